// Attention to stored rows, as plain numbers and pointers: what the bindings check and every SIMD level reads.
//
// No inline functions and no standard templates here or in what a level includes: a level's translation unit is compiled for
// instructions that the machine may lack, and the linker would be free to keep its copy of them for everybody.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvtool {

constexpr int TILE = 32;      // tokens decoded at a time
constexpr int TOGETHER = 32;  // tokens whose codes of a component lie together
constexpr int MAX_DIM = 512;  // a tile of it is 64 KiB of stack
constexpr int MAX_BLOCKS = 4;  // of D signs

enum class Type : int { FLOAT32, FLOAT16, BFLOAT16, CODES, COMPONENTS, CODEWORDS, SIGNS };

// Neighbouring codes of b bits, least significant first, each row from a byte of its own.
struct Stage {
  const uint8_t* codes;
  const uint8_t* end;  // of the memory that may be read
  int64_t head, row;   // strides in bytes
  int bits;
  const float* table;  // 2^bits values, repeated to at least 16; nullptr: the code itself
};

// Components that each have a number of bits of their own, in blocks of 32 tokens: in a block one after another, head by head.
struct Components {
  const uint8_t* codes;  // (blocks, bytes)
  const uint8_t* end;    // of the memory that may be read
  int64_t block;         // bytes of one
  const int32_t* first;  // (H + 1): those of head h are first[h] to first[h + 1]
  const int32_t* place;  // of each in a block, in bytes
  const uint8_t* bits;   // of each
  const int32_t* table;  // where the points of each start in `points`
  const float* points;   // 2^bits values, repeated to at least 16
  const uint8_t* planes;  // the points as a level takes them that looks up bytes; or nullptr
};

// Codes of a row that stand for codewords each: code i, of bits[i] bits from bit place[i] on, for `size` neighbouring entries from size i on;
// for entries i and i + D / 2 (a plane of RoPE); or for component i of a row.
enum class Form : int { RUNS, PLANES, PARTS };
struct Codewords {
  Form form;
  const uint8_t* codes;
  const uint8_t* end;  // of the memory that may be read
  int64_t head, row;   // strides in bytes
  int size;            // entries of a codeword: 1 to 8 of a run, 2 of a plane, 1 of a component
  int count;           // codes of a head's row
  const int32_t* place;   // (H, count)
  const uint8_t* bits;    // (H, count), 0 to 8
  const int64_t* table;   // (H, count): where the codewords of each begin in `values`; of a plane real parts, then imaginary ones, each repeated to 16
  const float* values;
  const uint16_t* halves;  // in place of `values`, of runs: float16; or nullptr
  const int32_t* span;    // (H, 2): the first byte of a row that holds codes of a head, and how many do
  bool alike;             // codes of a row are neighbours from a byte on, all of as many bits
  const int32_t* order;   // (D): which entry of a row each entry is; or nullptr
  const float* exact;     // (H, D): the rows whose bit 0 is set; or nullptr
};

// Values one after another: FLOAT32, FLOAT16 or BFLOAT16.
struct Reals {
  Type type;
  const uint8_t* x;
};

// Scales, steps or zeros: bfloat16, or what bfloat16 does not hold, float32.
struct Side {
  const void* at;  // or nullptr
  bool wide;
  explicit operator bool() const { return at; }
};

// x[s] = scale[s] R^T points[s] + centred[s] mean, or points step + zero, or of components y: basis^T y + mean, or with those of the keys
// beside them, size R^T y + mix^T y of the keys + mean.
struct Rows {
  Type type;
  int heads, count, dim;
  const uint8_t* data;  // of floats
  int64_t head, row;    // their strides in bytes
  int stages;           // of codes
  Stage stage[2];
  Side scale;         // (H, S); of bfloat16 negative for "without the mean", of float32 a factor
  const float* mean;  // (H, D), or nullptr
  Side step;          // affine: per channel (H, ceil(S / group), D), per token (H, S, ceil(D / group))
  Side zero;          // as wide as `step`
  int group;
  bool by_token;
  const float* signs;    // (D), or (H, D): points are T diag(signs) x, or T diag(signs)^-1 x; or nullptr
  int64_t signs_head;    // their stride
  const float* hartley;  // (odd, odd), D = odd 2^k
  int odd;
  Components components;
  const float* basis;  // (n + H, D padded): the rows that components are for, and the means; or nullptr
  Components sizes;    // one for each head
  const float* mix;    // (components of the keys, H, D padded), or nullptr
  Codewords words;
  int blocks;          // of D signs in the codes of the one stage
  const float* turns;  // (blocks, 2, D): of the two rotations that each block's signs are turned back by
};

// What is seen by a mask: a byte that is 0 or not, or a number added to the score.
enum class Seen : int { BOOL, FLOAT32, FLOAT16, BFLOAT16 };

// Some queries and some neighbouring rows. The workspace is the bindings'; padded sizes are multiples of 16.
struct Problem {
  Rows keys, values;
  int k_from, v_from, count;  // where the rows start, and how many
  int rows, padded_rows;      // queries of a KV head; padded: 1, 2 or a multiple of 4
  int dim, dim_v;             // padded
  const float* q;             // (H, R, D)
  const int32_t* first;       // (R): a query sees rows first to stop
  const int32_t* stop;
  Seen seen;
  const uint8_t* const* mask;  // (H, R): of each query, what it sees of these rows; or nullptr
  const float* angles;         // (count, 2 half) cosines, then sines; or nullptr
  int rope_first, half;
  bool paired;        // rotated entries of q are in pairs; those of the keys are half-split
  int chunk, chunks;  // tokens of one, and how many
  int ahead;          // tokens from the start of one to the start of that which the same thread most likely takes next
  float* turned;      // (H, padded_rows, dim)
  float* by_mean;     // (H, padded_rows)
  float* sums;        // (H, chunks, padded_rows, dim_v)
  float* states;      // (H, chunks, 3, padded_rows): maximum, sum, sum over rows with the mean
  int span;           // tokens taken together, a multiple of 32
  float* shared;      // (chunks, H, R, components of the keys, padded)
};

// What a solved problem found for queries of one sequence: those of its rows from `row` on.
struct Found {
  const Problem* problem;
  int row;
};

// Results of one sequence's queries, to which what problems found is added. Those of KV head h, group g and query i are at
// first + (h groups + g) every + i, in a problem in row g queries + i from the sequence's first.
struct Merging {
  const Found* found;
  int problems, groups, queries;
  int64_t first, every;
  float* out;    // (., D_v), not yet divided by their sums
  float* most;   // maximum of the scores
  float* total;  // sum of e^(score - most)
};

struct Encoder;
struct Searcher;
struct Calibrated;

// Cosines and sines of rows that follow each other: row t is (first + t) % each of page (first + t) / each.
struct Angles {
  const float* const* pages;  // (each, 2 half): cosines, then sines; or nullptr
  int each, first, half;
};

// Rows before RoPE to rows of a cache, (H, count, D) contiguous.
struct Decoding {
  Rows rows;
  int from, count;
  Type type;  // of the result; FLOAT16 is clipped to its finite numbers
  uint8_t* out;
  Angles angles;  // or none
  int rope_first;
  bool interleaved;  // rotated entries are stored half-split, and come out in pairs
};

// e^(i angle) of positions 64 index + low: hi of the index, times lo of the rest. Conjugate for the rotation that is undone.
struct Phases {
  const double* hi;  // (., 2 half) cosines, then sines; or nullptr
  const double* lo;  // (64, 2 half)
  const int32_t* index;
  const int32_t* low;
};

// Rows (H, S, D) of one type, turned in pairs of entries; the other entries are copied. The angles of a row are the same for all heads.
struct Turning {
  Type type;
  int heads, count, dim, first, half;
  const uint8_t* x;
  int64_t head, row;  // strides in bytes
  uint8_t* out;       // contiguous
  bool paired_in, paired_out;  // interleaved entries
  Angles undo, redo;           // or none
  Phases phases[2];
  float ratio;  // of magnitudes
};

struct Level {
  const char* name;
  const Encoder* encoder;
  const Searcher* searcher;
  const Calibrated* calibrated;
  void (*prepare)(const Problem&, int head);
  size_t (*attend_scratch)(const Problem&);  // floats
  void (*attend)(const Problem&, int first, int last, int chunk, float* scratch);  // heads first to last
  void (*merge)(const Merging&, int head);
  void (*decode)(const Rows&, int head, int from, int count, float* out);  // rows before RoPE, (count, D)
  // Of values with a mix, in place of `attend`.
  size_t (*attend_components_scratch)(const Problem&);  // floats
  void (*attend_components)(const Problem&, int chunk, float* scratch);
  void (*decode_as)(const Decoding&, int head, int start, int stop);
  void (*turn)(const Turning&, int start, int stop);  // of all heads, at most TILE tokens
};

extern const Level baseline;
#ifdef KVTOOL_X86
extern const Level avx2, avx512;
#endif
#ifdef KVTOOL_ARM64
extern const Level neon;
#endif

}  // namespace kvtool
