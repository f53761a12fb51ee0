// Codes of b bits as streams, and of values by tables, as plain numbers and pointers: what the bindings check and every SIMD level reads.
#pragma once
#include "problem.hpp"

namespace kvtool {

constexpr int MAX_ROTATED = 1024;  // entries of a row that is rotated
constexpr int MAX_CENTROIDS = 256;

// Values to the index of the nearest centroid, the lowest of equals, 0 where none is near.
struct Nearest {
  Reals x;
  const float* centroids;
  int count;           // of centroids
  int dim;             // of rows that are rotated first; or 0
  const float* signs;  // (dim): y = Sylvester's matrix (signs x) scale
  float scale;
  uint8_t* codes;
};

// Rows to the signs of Sylvester's matrix (signs x), packed, and their mean absolute entry.
struct Rotated {
  Reals x;
  int dim;
  const float* signs;
  uint8_t* packed;  // (rows, dim / 8), bit 0 lowest; 1 where an entry is >= 0
  float* size;      // (rows), of the orthonormal matrix
};

// Values to the number of boundaries below them, what the centroid there leaves, to that of others; both packed in words.
struct TwoStages {
  Reals x;
  Type left;  // type that a residual is rounded to
  int dim, bits;
  const float *centroids, *first, *second;
  uint8_t *packed1, *packed2;  // (rows, ceil(dim / (32 / bits))) words
};

struct Streamer {
  // From code 0 of the memory given; `words`: 32 / bits codes in each of 32 bits, none in two, in place of one stream.
  void (*pack)(const uint8_t* codes, int64_t count, int bits, bool words, uint8_t* out);
  void (*unpack)(const uint8_t* packed, int64_t count, int bits, bool words, uint8_t* codes);
  void (*nearest)(const Nearest&, int64_t from, int64_t to);  // values; whole rows where rows are rotated
  void (*look_up)(const uint8_t* codes, int64_t count, const uint16_t* table, uint16_t* out);  // of 256 entries
  void (*rotated)(const Rotated&, int64_t from, int64_t to);                                   // rows
  void (*two_stages)(const TwoStages&, int64_t from, int64_t to);                              // rows
  void (*pack_signs)(const float* x, int64_t count, uint8_t* out);                             // a multiple of 8
};

// Each level's, beside its `Level`.
extern const Streamer baseline_streamer;
#ifdef KVTOOL_X86
extern const Streamer avx2_streamer, avx512_streamer;
#endif
#ifdef KVTOOL_ARM64
extern const Streamer neon_streamer;
#endif

}  // namespace kvtool
