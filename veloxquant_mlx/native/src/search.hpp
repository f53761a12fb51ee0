// Search for codewords, as plain numbers and pointers: what the bindings check and every SIMD level reads. As in problem.hpp, no inline
// functions.
#pragma once
#include "problem.hpp"

namespace kvtool {

constexpr int MAX_SIZE = 512;  // entries of a vector

// Vectors (groups, count, columns, size) without gaps; each group and column has a table of its own.
template <class T>
struct Search {
  const T* points;
  int64_t count;
  int columns, size;
  const T* words;         // of all tables, (., size)
  const int32_t* first;   // (groups, columns): where a table begins
  const int32_t* number;  // of its codewords
  uint8_t* codes;         // (groups, count, columns), or nullptr
  int32_t* nearest;       // the same, or nullptr
};

// Codes (H, rows, count) of bytes to bits: each has `bits` of them from bit `place` of a row of `bytes` bytes on.
struct Packing {
  const uint8_t* codes;
  int64_t rows;
  int count, bytes;
  const int32_t* place;  // (H, count)
  const uint8_t* bits;
  uint8_t* out;
};

struct Searcher {
  void (*nearest)(const Search<float>&, int group, int64_t from, int64_t to);
  void (*nearest_double)(const Search<double>&, int group, int64_t from, int64_t to);
  void (*pack)(const Packing&, int head, int64_t from, int64_t to);
};

}  // namespace kvtool
