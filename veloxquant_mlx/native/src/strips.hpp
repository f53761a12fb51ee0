// Scores of keys before RoPE from their components, with the tokens in the lanes: a few columns of the keys at a time are built, rotated
// and multiplied by the queries in registers.
//
// This is the way of all levels but AVX-512: spans are taken in strips of few tokens, whose components stay in the nearest cache while all
// columns are made of them. Pairs of columns that RoPE turns slowly are not built (interpolated.hpp).
#pragma once
#include "components.hpp"
#include "interpolated.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"
#include "slow_columns.hpp"

#if !defined(__AVX512F__)

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

using Slow = Strips;

// Vectors of tokens, and columns of them: as many accumulators as leave registers for the rest.
constexpr int COLUMNS = W == 8 ? 6 : 4, VECTORS = 2, PAIRS = COLUMNS / 2;
constexpr int STRIP_ROW = STRIP + TOGETHER + 16;  // an odd number of lines of the cache: rows do not push each other out of it
constexpr int NONE = -1;

// Of a span of tokens the pairs that are interpolated, if they are more than what stands for them.
inline Strips slow_pairs(const Problem& p, int token, int count, float* weights, int64_t row) {
  if (count < MANY) return {p.half, {}, nullptr, weights, row};
  Strips to = strips_of(p, token, count, weights, row);
  if (2 * (p.half - to.first) < p.padded_rows * FINE) to.first = p.half;
  return to;
}

inline int whole(int size, int of) { return (size + of - 1) / of * of; }

// Floats that `score_columns` needs.
inline size_t columns_scratch(const Problem& p, int most) {
  const int64_t R = p.padded_rows, every = whole(p.dim, COLUMNS), size = most + 1;
  const int64_t nodes = R * FINE <= p.dim ? whole(R * COARSE, W) : 0, slow = (p.dim + size) * nodes + (COARSE + FINE) * whole(size * R, 2 * W);
  return size * (STRIP_ROW + every) + R * every + (nodes ? slow : 0);
}

// x[c][n] += y times COLUMNS columns, of `size` components, for VECTORS vectors of tokens; column(s, c) is where the entry of one is.
template <class F>
inline __attribute__((always_inline)) void add_products(const float* y, int size, F column, V (*x)[VECTORS]) {
  for (int s = 0; s < size; s++, y += STRIP_ROW) {
    V own[VECTORS];
    for (int n = 0; n < VECTORS; n++) own[n] = load(y + n * W);
    for (int c = 0; c < COLUMNS; c++)
      for (int n = 0; n < VECTORS; n++) x[c][n] += own[n] * *column(s, c);
  }
}

// COLUMNS columns, in two halves that RoPE turns with each other: by components and 1, then of each query.
struct Fast {
  const float *basis, *q;
  int size, rows;
  int64_t q_row;
  const float *cos[PAIRS], *sin[PAIRS];  // of each pair; of those that are not rotated none

  // scores[r][t] += those columns, rotated, times q[r].
  void add_scores(const float* y, int t, float* scores, int64_t score_row) const {
    V x[COLUMNS][VECTORS] = {};
    add_products(y, size, [&](int s, int c) __attribute__((always_inline)) { return basis + s * COLUMNS + c; }, x);
    const float* mean = basis + size * COLUMNS;
    for (int j = 0; j < PAIRS; j++)
      for (int n = 0; n < VECTORS; n++) {
        // The mean last, for it may be far larger than what is added up.
        const V a = x[j][n] + mean[j], b = x[j + PAIRS][n] + mean[j + PAIRS];
        const V c = cos[j] ? load(cos[j] + t + n * W) : all(1), d = cos[j] ? load(sin[j] + t + n * W) : V{};
        x[j][n] = a * c - b * d, x[j + PAIRS][n] = a * d + b * c;
      }
    for (int r = 0; r < rows; r++) {
      float* to = scores + r * score_row;
      for (int n = 0; n < VECTORS; n++) {
        V sum = load(to + n * W);
        for (int c = 0; c < COLUMNS; c++) sum += x[c][n] * q[r * q_row + c];
        store(to + n * W, sum);
      }
    }
  }
};

// What stands for the pairs that are interpolated: of each query a number at each node, by components and 1.
struct Interpolating {
  float* at;    // (COARSE, components and 1, R): at the nodes of the span
  float* fine;  // (FINE, components and 1, R): at those of a strip
  int size, rows;
  int64_t row;  // of both

  void take_strip(const Strips& by, int strip) {
    const float* weights = by.to_fine + strip * FINE * COARSE;
    for (int i = 0; i < row; i += 2 * W) {
      V x[FINE][2] = {};
      for (int n = 0; n < COARSE; n++) {
        const float* own = at + n * row + i;
        for (int f = 0; f < FINE; f++)
          for (int v = 0; v < 2; v++) x[f][v] += load(own + v * W) * weights[f * COARSE + n];
      }
      for (int f = 0; f < FINE; f++)
        for (int v = 0; v < 2; v++) store(fine + f * row + i + v * W, x[f][v]);
    }
  }

  // scores[r][t] += COLUMNS of them from `first` on, each times the weight of its node, for `count` tokens.
  void add_scores(const float* y, int count, int first, const float* weights, int64_t weight_row, float* scores, int64_t score_row) const {
    const int stop = FINE * rows - first < COLUMNS ? FINE * rows - first : COLUMNS;
    const float *column[COLUMNS], *weight[COLUMNS];
    float* to[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
      const int of = first + (c < stop ? c : 0), f = of / rows, r = of % rows;
      column[c] = fine + f * row + r, weight[c] = weights + f * weight_row, to[c] = scores + r * score_row;
    }
    for (int t = 0; t < count; t += VECTORS * W) {
      V x[COLUMNS][VECTORS] = {};
      add_products(y + t, size, [&](int s, int c) __attribute__((always_inline)) { return column[c] + s * rows; }, x);
      for (int c = 0; c < stop; c++)
        for (int n = 0; n < VECTORS; n++) {
          float* sum = to[c] + t + n * W;
          store(sum, load(sum) + (x[c][n] + column[c][size * rows]) * load(weight[c] + t + n * W));
        }
    }
  }
};

// The columns of pairs that are rotated, then of entries that are not, unless these are one with the slow pairs: in blocks, of which the
// first half is turned with the second; NONE fills up the last. Returns how many.
inline int order_of(const Problem& p, int fast, int* order) {
  int pairs = 0;
  auto add = [&](int a, int b) {
    int* to = order + pairs / PAIRS * COLUMNS + pairs % PAIRS;
    to[0] = a, to[PAIRS] = b, pairs++;
  };
  for (int j = 0; j < fast; j++) add(p.rope_first + j, p.rope_first + p.half + j);
  if (fast == p.half) {
    int one = NONE;
    for (int d = 0; d < p.keys.dim; d++) {
      if (d >= p.rope_first && d < p.rope_first + 2 * p.half) continue;
      if (one == NONE) one = d;
      else add(one, d), one = NONE;
    }
    if (one != NONE) add(one, NONE);
  }
  while (pairs % PAIRS) add(NONE, NONE);
  return 2 * pairs;
}

// Scores of one head's queries with `count` tokens, rows of `span`; cosines and then sines of the pairs that are not slow are rows of
// `angle_row`, from this token on.
inline void score_columns(
    const Problem& p, int head, int token, int count, const float* angles, int64_t angle_row, const Strips& slow, CodesAhead& keys_ahead,
    CodesAhead& values_ahead, float* scratch, float* scores) {
  const Rows& keys = p.keys;
  const Components& c = keys.components;
  const int begin = c.first[head], size = c.first[head + 1] - begin, from = p.k_from + token, R = p.padded_rows, lead = from % TOGETHER;
  int order[2 * MAX_DIM];
  const int plain = order_of(p, slow.first, order), blocks = plain / COLUMNS;
  float *y = scratch, *made = y + size * STRIP_ROW, *q = made + (size + 1) * plain, *rest = q + R * plain;

  for (int b = 0; b < blocks; b++) {
    const int* from = order + b * COLUMNS;
    bool neighbours = true;
    for (int i = 0; i < COLUMNS; i++) neighbours = neighbours && from[i] == from[i / PAIRS * PAIRS] + i % PAIRS;
    float* to = made + b * (size + 1) * COLUMNS;
    for (int s = 0; s <= size; s++, to += COLUMNS) {
      const float* row = keys.basis + int64_t(s < size ? begin + s : c.first[keys.heads] + head) * p.dim;
      if (neighbours) memcpy(to, row + from[0], PAIRS * sizeof(float)), memcpy(to + PAIRS, row + from[PAIRS], PAIRS * sizeof(float));
      else
        for (int i = 0; i < COLUMNS; i++) to[i] = from[i] == NONE ? 0 : row[from[i]];
    }
  }
  for (int r = 0; r < R; r++) {
    const float* row = p.turned + (int64_t(head) * R + r) * p.dim;
    for (int i = 0; i < plain; i++) q[r * plain + i] = order[i] == NONE ? 0 : row[order[i]];
    memset(scores + r * p.span, 0, sizeof(float) * padded(count));
  }
  const bool slowly = slow.first < p.half;
  Interpolating nodes{rest, nullptr, size, R, whole((size + 1) * R, 2 * W)};
  nodes.fine = nodes.at + COARSE * nodes.row;
  if (slowly) {
    const int columns = whole(R * COARSE, W);
    float *together = nodes.fine + FINE * nodes.row, *turned = together + (size + 1) * columns;
    at_nodes(p, head, token, slow, turned, together, columns);
    for (int n = 0; n < COARSE; n++)
      for (int s = 0; s <= size; s++)
        for (int r = 0; r < R; r++) nodes.at[n * nodes.row + s * R + r] = together[s * columns + n * R + r];
    for (int n = 0; n < COARSE; n++)
      for (int i = (size + 1) * R; i < nodes.row; i++) nodes.at[n * nodes.row + i] = 0;
  }

  for (int start = 0; start < count; start += STRIP) {
    const int some = count - start < STRIP ? count - start : STRIP;
    decode_components<16>(c, begin, begin + size, from + start, some, y, STRIP_ROW);
    for (int b = 0; b < blocks; b++) {
      Fast own{made + b * (size + 1) * COLUMNS, q + b * COLUMNS, size, R, plain, {}, {}};
      for (int j = 0; j < PAIRS; j++) {
        const int pair = b * PAIRS + j;
        if (pair < slow.first) own.cos[j] = angles + pair * angle_row + start, own.sin[j] = own.cos[j] + slow.first * angle_row;
      }
      for (int t = 0; t < some; t += VECTORS * W) {
        own.add_scores(y + lead + t, t, scores + start + t, p.span);
        values_ahead.next(3), keys_ahead.next(2);
      }
    }
    if (!slowly) continue;
    nodes.take_strip(slow, start / STRIP);
    for (int first = 0; first < FINE * R; first += COLUMNS)
      nodes.add_scores(y + lead, some, first, slow.weights + start, slow.row, scores + start, p.span);
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool

#endif
