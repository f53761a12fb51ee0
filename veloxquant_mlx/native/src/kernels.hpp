// Functions of the kernel API that code rows for no codec, as plain numbers and pointers: what the bindings check and every SIMD level reads.
#pragma once
#include "problem.hpp"

namespace kvtool {

// Bits in which rows differ from a query, times scale, plus an offset of each row.
struct Hamming {
  const uint8_t *query, *bits;  // (width), (rows, width)
  int width;
  const float* offsets;
  float scale;
  float* out;
};

// factor norms[s, h] sum of +-q[h], the signs those of row s.
struct SignScores {
  const float* q;         // (H, 8 width)
  const uint8_t* packed;  // (S, H, width), bit 0 lowest
  const float* norms;     // (S, H)
  int heads, width;
  int64_t slots;
  float factor;
  float* out;  // (H, S)
};

// sign times the product of each row with its group's filter.
struct Projected {
  Reals x;  // (G, rows, dim)
  int64_t rows;
  int dim, sign;
  const float* filters;  // (G, dim)
  float* out;            // (G, rows)
};

// Values in groups along an axis: to the nearest of levels + 1 steps between a group's lowest and highest, and back.
struct RoundTrip {
  Reals x;  // (outer, length, inner), groups along `length`
  int64_t length, inner;
  int64_t group;
  float levels, eps;
  uint8_t* out;
};

// Entries of a table, `width` bytes each, in place of their indices; an index beyond it is the last.
struct Gather {
  const uint8_t* indices;
  int size;  // bytes of an index: 1, 2 or 4
  const uint8_t* table;
  int64_t count, width;
  uint8_t* out;
};

// Rows of each group without one of them.
struct DropRow {
  const uint8_t* x;     // (G, rows, width) bytes
  int64_t rows, width;
  const int32_t* gone;  // (G)
  uint8_t* out;         // (G, rows - 1, width)
};

// The same of keys, those of a later position than the row that is gone turned back by one: pairs of entries half a row apart.
struct TurnBack {
  Reals x;  // (G, rows, dim)
  int64_t rows;
  int dim;
  const int32_t *gone, *positions;  // (G), (G, rows)
  const float* turn;                // (2, dim / 2): cosines, sines
  uint8_t* out;                     // (G, rows - 1, dim)
};

struct Kernels {
  void (*hamming)(const Hamming&, int64_t from, int64_t to);              // rows
  void (*sign_scores)(const SignScores&, int head, int64_t from, int64_t to);  // slots
  void (*project)(const Projected&, int64_t from, int64_t to);            // rows of all groups
  void (*round_trip)(const RoundTrip&, int64_t from, int64_t to);         // groups of an axis, those of all `outer`
  void (*gather)(const Gather&, int64_t from, int64_t to);
  void (*drop_row)(const DropRow&, int64_t from, int64_t to);             // rows of all groups that are left
  void (*turn_back)(const TurnBack&, int64_t from, int64_t to);           // the same
};

// Each level's, beside its `Level`.
extern const Kernels baseline_kernels;
#ifdef KVTOOL_X86
extern const Kernels avx2_kernels, avx512_kernels;
#endif
#ifdef KVTOOL_ARM64
extern const Kernels neon_kernels;
#endif

}  // namespace kvtool
