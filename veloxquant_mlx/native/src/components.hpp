// Codes of components to rows of floats, one component of many tokens after another.
#pragma once
#include "lookup.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

template <int BITS>
void decode_component(const Components& c, const uint8_t* codes, const float* table, int blocks, float* out) {
  const Lookup<BITS> lookup(table);
  for (int b = 0; b < blocks; b++, codes += c.block, out += TOGETHER) {
    uint8_t last[4 * BITS + SLACK];
    const bool near_end = c.end - codes < 4 * BITS + SLACK;
    if (near_end) memcpy(last, codes, 4 * BITS), memset(last + 4 * BITS, 0, SLACK);
    for (int i = 0; i < TOGETHER / W; i++) store(out + i * W, lookup.template vector<true>(near_end ? last : codes, i));
  }
}

// Component i of tokens from .. from + count, at out + from % 32. Up to 32 floats behind them are finite, for whoever reads whole tiles.
inline void decode_component(const Components& c, int i, int from, int count, float* out) {
  const int block = from / TOGETHER, blocks = (from + count + TOGETHER - 1) / TOGETHER - block;
  const uint8_t* codes = c.codes + block * c.block + c.place[i];
  const float* table = c.points + c.table[i];
  memset(out + blocks * TOGETHER, 0, TOGETHER * sizeof(float));
  with_bits(c.bits[i], [&](auto bits) { decode_component<decltype(bits)::value>(c, codes, table, blocks, out); });
}

// Codes of neighbouring components in blocks of tokens, asked for a few lines of the cache at a time while others are worked on: they are
// apart, so that no machine foresees them.
struct CodesAhead {
  const uint8_t* at = nullptr;
  int64_t block = 0;
  int bytes = 0, blocks = 0, done = 0;

  CodesAhead() = default;
  // Of components first .. last, none of them without bits, of tokens from .. from + count.
  CodesAhead(const Components& c, int first, int last, int from, int count) {
    if (first >= last || count <= 0) return;
    at = c.codes + from / TOGETHER * c.block + c.place[first], block = c.block;
    bytes = c.place[last - 1] + 4 * c.bits[last - 1] - c.place[first], blocks = (from + count + TOGETHER - 1) / TOGETHER - from / TOGETHER;
  }

  void next(int lines) {
    for (; lines > 0 && blocks > 0; lines--) {
      __builtin_prefetch(at + (done < bytes ? done : bytes - 1), 0, 2);
      if (done < bytes) done += 64;
      else done = 0, at += block, blocks--;
    }
  }
};

// Components from .. to of `count` tokens, each `row` floats from the last; the first token at out + from % 32.
inline void decode_components(const Components& c, int first, int last, int from, int count, float* out, int64_t row) {
  for (int i = first; i < last; i++, out += row) decode_component(c, i, from, count, out);
}

// Rows of a tile of tokens from their components y, one after another: y times the basis, and the mean.
inline void rows_from_components(const Rows& rows, int head, Matrix y, float* out) {
  constexpr int DB = at_once<4>();
  const int* first = rows.components.first;
  const int dim = padded(rows.dim), count = first[head + 1] - first[head];
  const Matrix basis{rows.basis + int64_t(first[head]) * dim, dim}, mean{rows.basis + int64_t(first[rows.heads] + head) * dim, 0};
  const float one[4] = {1, 1, 1, 1};
  // As many columns at a time as fit beside the components in the nearest cache.
  int d = 0;
  for (; d + DB * W <= dim; d += DB * W)
    for (int t = 0; t < TILE; t += 4) some_sums<4, DB>(y.at + t, 1, y.row, one, mean, basis, count, d, out + t * dim, dim);
  for (; d < dim; d += W)
    for (int t = 0; t < TILE; t += 4) some_sums<4, 1>(y.at + t, 1, y.row, one, mean, basis, count, d, out + t * dim, dim);
}

// The entries of a query by the keys' components, and its product with their mean.
inline float to_components(const Rows& rows, int head, const float* q, float* to) {
  const int* first = rows.components.first;
  const int dim = padded(rows.dim), count = first[head + 1] - first[head];
  auto product = [&](int row) {
    const float* x = rows.basis + int64_t(row) * dim;
    float sum = 0;
    for (int i = 0; i < rows.dim; i++) sum += q[i] * x[i];
    return sum;
  };
  for (int i = 0; i < count; i++) to[i] = product(first[head] + i);
  return product(first[rows.heads] + head);
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
