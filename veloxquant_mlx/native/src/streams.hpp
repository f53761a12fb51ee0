// Codes of b bits as streams, and of values by tables, as plain numbers and pointers: what the bindings check and every SIMD level reads.
#pragma once
#include "problem.hpp"

namespace kvtool {

constexpr int MAX_ROTATED = 1024;  // entries of a row that is rotated
constexpr int MAX_CENTROIDS = 256;

// Values to the index of the nearest centroid, the lowest of equals, 0 where none is near.
struct Nearest {
  Type type;  // FLOAT32, FLOAT16 or BFLOAT16
  const uint8_t* x;
  const float* centroids;
  int count;           // of centroids
  int dim;             // of rows that are rotated first; or 0
  const float* signs;  // (dim): y = Sylvester's matrix (signs x) scale
  float scale;
  uint8_t* codes;
};

struct Streamer {
  // From code 0 of the memory given; `words`: 32 / bits codes in each of 32 bits, none in two, in place of one stream.
  void (*pack)(const uint8_t* codes, int64_t count, int bits, bool words, uint8_t* out);
  void (*unpack)(const uint8_t* packed, int64_t count, int bits, bool words, uint8_t* codes);
  void (*nearest)(const Nearest&, int64_t from, int64_t to);  // values; whole rows where rows are rotated
  void (*look_up)(const uint8_t* codes, int64_t count, const uint16_t* table, uint16_t* out);  // of 256 entries
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
