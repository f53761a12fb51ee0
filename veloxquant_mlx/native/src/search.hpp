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
  const T* half;          // half the square of each word, or nullptr
  const T* largest;       // (groups, columns): the largest square of a table
};

// What a round of k-means needs of points (G, count, size) whose nearest of `number` words of their group are known.
struct Moments {
  const double* points;
  const double* words;  // (G, number, size)
  int64_t count;
  int number, size;
  const int32_t* nearest;  // (G, count)
  double* sums;            // (G, number, size)
  int64_t* counts;         // (G, number)
  double* distances;       // (G, count)
};

// Rows of floats to codes of runs: y = (x unit / divisor) H, or x unit in an order of its own; every `size` neighbouring entries of y by
// their nearest word.
struct RunCoding {
  Rows x;
  float unit;
  const float* divisor;   // (H, D), D = 2^k; or nullptr
  const int32_t* order;   // (D): which entry of x each of y is; or nullptr
  int size, runs, number, bits;
  const float* words;     // of all tables, (., size), `number` to each
  const int32_t* first;   // (H, runs): where a table begins
  const float* half;      // half the square of each word
  const float* largest;   // (H, runs): the largest square of a table
  int64_t bytes;          // of a row of codes
  uint8_t* codes;         // (H, S, bytes)
};

// Rows of floats to codes of planes: z = (x - mean) turned, a complex number of entries i and j, by the nearest of 2^b words of b bits. The
// first bit of a row says whether it is the one that is kept as it is.
struct PlaneCoding {
  Rows x;
  const float* mean;      // (H, D)
  const int32_t* planes;  // (2, D / 2): the entries
  const float* turn;      // (H, D / 2, 3): real and imaginary part, and a factor
  const float* words;     // (., 2): those of b bits begin at 2^b - 1
  const uint8_t* bits;    // (H, 1 + D / 2): of the flag, and of each plane
  const int32_t* place;   // the same: the bit of a row
  const int32_t* kept;    // (H)
  int64_t bytes;
  uint8_t* codes;  // (H, S, bytes)
};

// Of each row the mean of |x - middle| inverse, squared, over that of |x| inverse.
struct Farness {
  Rows x;
  const float* middle;   // (H, D)
  const float* inverse;  // (H, D)
  float* out;            // (H, S)
};

struct Searcher {
  void (*nearest)(const Search<float>&, int group, int64_t from, int64_t to);
  void (*nearest_double)(const Search<double>&, int group, int64_t from, int64_t to);
  void (*accumulate)(const Moments&, int group);
  void (*runs)(const RunCoding&, int head, int from, int count);
  void (*planes)(const PlaneCoding&, int head, int from, int count);
  void (*farness)(const Farness&, int head, int from, int count);
};

}  // namespace kvtool
