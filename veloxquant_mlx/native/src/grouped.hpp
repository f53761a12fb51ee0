// Scores of keys before RoPE from their components, with the tokens in the lanes: a few columns of the keys at a time are built, rotated
// and multiplied by the queries in registers.
//
//     k[t, d] = mean[d] + sum over components of y[i, t] basis[i, d] + sum over groups of table[d, group, index[group, t]]
//
// This is AVX-512's way, which takes whole spans: components of few bits that together have five are one index into a table of their sums,
// which an instruction looks up for 16 tokens at once, in units that products leave free. Pairs of columns that RoPE turns slowly are not
// built: a few columns of each query stand for all of them (interpolated.hpp).
#pragma once
#include "components.hpp"
#include "interpolated.hpp"
#include "lookup.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"
#include "slow_columns.hpp"

#if defined(__AVX512F__)

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int INDEX_BITS = 5, GROUPED_BITS = 2, COLUMNS = 8;
constexpr int ENTRIES = 1 << INDEX_BITS, VECTORS = 2;  // of tokens: as many accumulators as leave registers for the rest
constexpr int BETWEEN = 3;  // products after each lookup
// The components of one head: those that are multiplied, and groups of those that are looked up.
struct Taken {
  int singles = 0, groups = 0;
  int single[MAX_DIM];
  int begin[MAX_DIM + 1];  // of each group in `member`
  int member[MAX_DIM], shift[MAX_DIM];  // of its code in the index
};

// The longest codes first, each to the first group with room for it.
inline void take(const Components& c, int first, int last, bool grouped, Taken& to) {
  int group_of[MAX_DIM], room[MAX_DIM];
  for (int bits = 8; bits > 0; bits--)
    for (int i = first; i < last; i++) {
      if (c.bits[i] != bits) continue;
      int k = group_of[i - first] = -1;
      if (!grouped || bits > GROUPED_BITS) {
        to.single[to.singles++] = i;
        continue;
      }
      for (k = 0; k < to.groups && room[k] < bits;) k++;
      if (k == to.groups) room[to.groups++] = INDEX_BITS;
      room[k] -= bits, group_of[i - first] = k;
    }
  int at = to.begin[0] = 0;
  for (int k = 0; k < to.groups; to.begin[++k] = at)
    for (int i = first, shift = 0; i < last; i++)
      if (group_of[i - first] == k) to.member[at] = i, to.shift[at++] = shift, shift += c.bits[i];
}

constexpr Pattern PATTERNS[GROUPED_BITS + 1] = {Pattern(1), Pattern(1), Pattern(2)};

// Indices of a group's codes of tokens from .. from + count, at out + from % 32, as `decode_component` writes points.
inline void index_group(const Components& c, const Taken& g, int k, int from, int count, uint32_t* out) {
  const int first = from / TOGETHER, blocks = (from + count + TOGETHER - 1) / TOGETHER - first;
  memset(out, 0, blocks * TOGETHER * sizeof(uint32_t));
  for (int m = g.begin[k]; m < g.begin[k + 1]; m++) {
    const int bits = c.bits[g.member[m]];
    const uint8_t* codes = c.codes + first * c.block + c.place[g.member[m]];
    const __m512i mask = _mm512_set1_epi32((1 << bits) - 1);
    const __m128i shift = _mm_cvtsi32_si128(g.shift[m]);
    auto add = [&](const uint8_t* at, uint32_t* to) {
      const __m512i code = _mm512_sll_epi32(_mm512_and_si512(spread(at, PATTERNS[bits]), mask), shift);
      _mm512_storeu_si512(to, _mm512_or_si512(_mm512_loadu_si512(to), code));
    };
    for (int b = 0; b < blocks; b++, codes += c.block) {
      uint8_t last[4 * GROUPED_BITS + SLACK] = {};
      const bool near_end = c.end - codes < 4 * GROUPED_BITS + SLACK;
      if (near_end) memcpy(last, codes, 4 * bits);
      const uint8_t* own = near_end ? last : codes;
      add(own, out + b * TOGETHER), add(own + 2 * bits, out + b * TOGETHER + W);
    }
  }
}

// Every member's points by the index that its code is in, ENTRIES each.
inline void entries_of(const Components& c, const Taken& g, float* points) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int m = 0; m < g.begin[g.groups]; m++)
    for (int e = 0; e < ENTRIES; e += W, points += W) {
      const int i = g.member[m];
      const __m512i code = _mm512_srl_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(e)), _mm_cvtsi32_si128(g.shift[m]));
      const __m512i mask = _mm512_set1_epi32((1 << c.bits[i]) - 1);
      _mm512_storeu_ps(points, _mm512_i32gather_ps(_mm512_and_si512(code, mask), c.points + c.table[i], 4));
    }
}

struct Table {
  __m512 low, high;
  explicit Table(const float* at) : low(_mm512_loadu_ps(at)), high(_mm512_loadu_ps(at + W)) {
    asm("" : "+v"(low), "+v"(high));  // GCC would load them anew for each vector of tokens
  }
  V operator[](const uint32_t* index) const { return (V)_mm512_permutex2var_ps(low, _mm512_loadu_si512(index), high); }
};

// COLUMNS columns of the keys, in two halves that RoPE turns with each other, or columns that are interpolated; and what they are made of.
struct Columns {
  const Taken* from;
  alignas(64) float mean[COLUMNS];
  float* basis;   // (singles, COLUMNS)
  float* tables;  // (groups, COLUMNS, ENTRIES)
  const float *y, *cos[COLUMNS / 2], *sin[COLUMNS / 2];  // of each pair; of those that are not rotated none
  const uint32_t* index;
  int64_t row;

  // Of the rows of `matrix`, component by component from `first` on, and `means` the columns `order`.
  void make(Matrix matrix, const float* means, int first, const int* order, const float* points) {
    for (int c = 0; c < COLUMNS; c++) mean[c] = means[order[c]];
    for (int s = 0; s < from->singles; s++)
      for (int c = 0; c < COLUMNS; c++) basis[s * COLUMNS + c] = matrix.at[(from->single[s] - first) * matrix.row + order[c]];
    float* to = tables;
    for (int k = 0; k < from->groups; k++) {
      V x[COLUMNS][ENTRIES / W] = {};
      for (int m = from->begin[k]; m < from->begin[k + 1]; m++) {
        const float *own = matrix.at + (from->member[m] - first) * matrix.row, *values = points + m * ENTRIES;
        for (int c = 0; c < COLUMNS; c++)
          for (int v = 0; v < ENTRIES / W; v++) x[c][v] += load(values + v * W) * own[order[c]];
      }
      for (int c = 0; c < COLUMNS; c++)
        for (int v = 0; v < ENTRIES / W; v++, to += W) store(to, x[c][v]);
    }
  }

  inline __attribute__((always_inline)) void add_single(int s, int t, V (*x)[VECTORS]) const {
    V own[VECTORS];
    for (int n = 0; n < VECTORS; n++) own[n] = load(y + s * row + t + n * W);
    for (int c = 0; c < COLUMNS; c++)
      for (int n = 0; n < VECTORS; n++) x[c][n] += own[n] * basis[s * COLUMNS + c];
  }

  // Those columns of VECTORS vectors of tokens, without their means.
  inline __attribute__((always_inline)) void columns(int t, V (*x)[VECTORS]) const {
    int s = 0;
    for (int k = 0; k < from->groups; k++) {
      const float* table = tables + k * COLUMNS * ENTRIES;
      for (int c = 0; c < COLUMNS; c++) {
        const Table own(table + c * ENTRIES);
        for (int n = 0; n < VECTORS; n++) x[c][n] += own[index + k * row + t + n * W];
      }
      // Some products after each: both kinds of units have work. A constant number, for a loop's end is not foreseen each time.
      if (s + BETWEEN > from->singles) continue;
      for (int i = 0; i < BETWEEN; i++) add_single(s++, t, x);
    }
    for (; s < from->singles; s++) add_single(s, t, x);
  }

  // scores[r][t] += those columns, rotated, times q[r].
  void add_scores(int t, Matrix q, int rows, float* scores, int64_t score_row) const {
    V x[COLUMNS][VECTORS] = {};
    columns(t, x);
    constexpr int PAIRS = COLUMNS / 2;
    for (int j = 0; j < PAIRS; j++)
      for (int n = 0; n < VECTORS; n++) {
        // The mean last, for it may be far larger than what is added up.
        const V a = x[j][n] + mean[j], b = x[j + PAIRS][n] + mean[j + PAIRS];
        const V c = cos[j] ? load(cos[j] + t + n * W) : all(1), d = cos[j] ? load(sin[j] + t + n * W) : V{};
        x[j][n] = a * c - b * d, x[j + PAIRS][n] = a * d + b * c;
      }
    for (int r = 0; r < rows; r++) {
      float* to = scores + r * score_row + t;
      for (int n = 0; n < VECTORS; n++) {
        V sum = load(to + n * W);
        for (int c = 0; c < COLUMNS; c++) sum += x[c][n] * q.at[r * q.row + c];
        store(to + n * W, sum);
      }
    }
  }

  // scores[r][t] += column (node, r), from column `first` on, times the weight of that node.
  void add_interpolated(int t, int first, int rows, const Interpolated& by, float* scores, int64_t score_row) const {
    V x[COLUMNS][VECTORS] = {};
    columns(t, x);
    for (int c = 0; c < COLUMNS && first + c < rows * NODES; c++) {
      float* to = scores + (first + c) % rows * score_row + t;
      const float* own = by.weights + (first + c) / rows * by.row + t;
      for (int n = 0; n < VECTORS; n++) store(to + n * W, load(to + n * W) + (x[c][n] + mean[c]) * load(own + n * W));
    }
  }
};

using Slow = Interpolated;

// Of a span of tokens the pairs that are interpolated, if they are worth it: they leave whole COLUMNS, and are more than what stands for them.
inline Interpolated slow_pairs(const Problem& p, int token, int count, float* weights, int64_t row) {
  if (count < MANY) return {p.half, {}, weights, row};
  constexpr int PAIRS = COLUMNS / 2;
  Interpolated to = interpolate(p, token, count, (count + TILE - 1) / TILE * TILE, weights, row);
  to.first = (to.first + PAIRS - 1) / PAIRS * PAIRS;
  if (2 * (p.half - to.first) < p.padded_rows * NODES) to.first = p.half;
  return to;
}

// Floats that `score_columns` needs.
inline size_t columns_scratch(const Problem& p, int most) {
  const int64_t row = p.span + 2 * TOGETHER, R = p.padded_rows, nodes = R * NODES <= p.dim ? padded(R * NODES) : 0;
  return most * (row + ENTRIES + COLUMNS * ENTRIES + COLUMNS) + R * (p.dim + COLUMNS) + (p.dim + most + 1) * nodes;
}

// Scores of one head's queries with `count` tokens, rows of `span`; cosines and then sines of the pairs that are not slow are rows of
// `angle_row`, from this token on.
inline void score_columns(
    const Problem& p, int head, int token, int count, const float* angles, int64_t angle_row, const Interpolated& slow, CodesAhead& keys_ahead,
    CodesAhead& values_ahead, float* scratch, float* scores) {
  const Rows& keys = p.keys;
  const Components& c = keys.components;
  const int begin = c.first[head], size = c.first[head + 1] - begin, from = p.k_from + token, R = p.padded_rows;
  const float *basis = keys.basis + int64_t(begin) * p.dim, *means = keys.basis + int64_t(c.first[keys.heads] + head) * p.dim;
  Taken taken;
  take(c, begin, begin + size, count >= MANY, taken);
  const int own = taken.singles + taken.groups;
  const int64_t row = p.span + 2 * TOGETHER;
  // Blocks of pairs that are rotated, then of what is not or, with slow pairs, is theirs: the first halves, then the second.
  constexpr int PAIRS = COLUMNS / 2;
  const int nodes = slow.first < p.half ? R * NODES : 0;
  int order[MAX_DIM + COLUMNS], pairs = 0, apart = 0;
  auto add = [&](int a, int b) {
    int* to = order + pairs / PAIRS * COLUMNS + pairs % PAIRS;
    to[0] = a, to[PAIRS] = b, pairs++;
  };
  for (int j = 0; j < slow.first; j++) add(p.rope_first + j, p.rope_first + p.half + j);
  if (!nodes) {
    int rest[MAX_DIM + COLUMNS];
    for (int d = 0; d < p.dim; d++)
      if (d < p.rope_first || d >= p.rope_first + 2 * p.half) rest[apart++] = d;
    for (int i = 0; i + 1 < apart && 2 * pairs < (keys.dim + COLUMNS - 1) / COLUMNS * COLUMNS; i += 2) add(rest[i], rest[i + 1]);
  }
  const int plain = 2 * pairs, columns = padded(nodes);
  float *y = scratch, *points = y + own * row;  // what is loaded by whole vectors first: none then lies in two lines of the cache
  auto* index = reinterpret_cast<uint32_t*>(y + taken.singles * row);
  float *tables = points + taken.begin[taken.groups] * ENTRIES, *made = tables + taken.groups * COLUMNS * ENTRIES;
  float *turned = made + (size + 1) * columns, *q = turned + p.dim * columns;
  const int lead = from % TOGETHER;
  Columns at{&taken, {}, q + R * plain, tables, y + lead, {}, {}, index + lead, row};
  for (int s = 0; s < taken.singles; s++) decode_component(c, taken.single[s], from, count, y + s * row);
  for (int k = 0; k < taken.groups; k++) index_group(c, taken, k, from, count, index + k * row);
  entries_of(c, taken, points);
  if (nodes) at_nodes(p, head, token, slow, turned, made, columns);
  const float* given = p.turned + int64_t(head) * R * p.dim;
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < plain; i++) q[r * plain + i] = given[r * p.dim + order[i]];
    memset(scores + r * p.span, 0, sizeof(float) * padded(count));
  }
  for (int first = 0; first < plain; first += COLUMNS) {
    at.make({basis, p.dim}, means, begin, order + first, points);
    for (int j = 0; j < PAIRS; j++) {
      const int pair = first / 2 + j;
      at.cos[j] = pair < slow.first ? angles + pair * angle_row : nullptr, at.sin[j] = angles + (slow.first + pair) * angle_row;
    }
    for (int t = 0; t < count; t += VECTORS * W) {
      at.add_scores(t, {q + first, plain}, R, scores, p.span);
      values_ahead.next(3), keys_ahead.next(2);
    }
  }
  for (int i = 0; i < columns; i++) order[i] = i;
  for (int first = 0; first < nodes; first += COLUMNS) {
    at.make({made, columns}, made + size * columns, begin, order + first, points);
    for (int t = 0; t < count; t += VECTORS * W) at.add_interpolated(t, first, R, slow, scores, p.span);
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool

#endif
