// Rows from components of few bits, without a product: components that together have six bits are one index into a table of sums.
//
//     k[t, d] = step[d] sum over groups of table[d, group, index[group, t]] + mean[d]
//
// A table holds whole numbers in steps of 2^-25 of the largest sum that its column can have: the low 10 bits and the rest in 64 words each,
// which an instruction looks up for 32 tokens at once, and which words add up exactly. So the sums are as exact as those of floats are.
#pragma once
#include "components.hpp"
#include "lookup.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

#if defined(__AVX512BW__)

constexpr bool GROUPED = true;
constexpr int INDEX_BITS = 6, ENTRIES = 1 << INDEX_BITS;
constexpr int LOW_BITS = 10, MOST_GROUPS = 64;  // as many low parts as a word of 16 bits holds the sum of
constexpr float LARGEST_SUM = (1 << 25) - (1 << 17);  // less than 2^15 high parts, each rounded down
constexpr int MOST_WIDE = 8;
constexpr int STRIP = 128;  // tokens of one pass over two columns' tables
constexpr int COLUMNS = 8;  // columns of a span that are made before they are multiplied

// The components of one head.
struct Groups {
  int count, wide;
  int begin[MOST_GROUPS + 1];  // of each group in `member`
  int member[MAX_DIM];
  int shift[MAX_DIM];  // of the member's code in the index
  int wides[MOST_WIDE];  // components of more bits than an index
};

// Whether tables take less time than products: the longest codes first, each to the first group with room for it.
inline bool group_components(const Components& c, int first, int last, Groups& g) {
  int group_of[MAX_DIM], room[MOST_GROUPS], size[MOST_GROUPS] = {};
  g.count = g.wide = 0;
  for (int bits = 8; bits > 0; bits--)
    for (int i = first; i < last; i++) {
      if (c.bits[i] != bits) continue;
      if (bits > INDEX_BITS) {
        if (g.wide == MOST_WIDE) return false;
        g.wides[g.wide++] = i, group_of[i - first] = -1;
        continue;
      }
      int k = 0;
      while (k < g.count && room[k] < bits) k++;
      if (k == MOST_GROUPS) return false;
      if (k == g.count) room[g.count++] = INDEX_BITS;
      room[k] -= bits, size[k]++, group_of[i - first] = k;
    }
  // Those of as many members beside each other: where a loop ends is then foreseen.
  g.begin[0] = 0;
  for (int members = 1, k = 0; members <= INDEX_BITS; members++)
    for (int group = 0; group < g.count; group++) {
      if (size[group] != members) continue;
      int at = g.begin[k], shift = 0;
      for (int i = first; i < last; i++)
        if (group_of[i - first] == group) g.member[at] = i, g.shift[at++] = shift, shift += c.bits[i];
      g.begin[++k] = at;
    }
  return 4 * (g.count + g.wide) <= 3 * (last - first);
}

constexpr Pattern PATTERNS[INDEX_BITS + 1] = {Pattern(1), Pattern(1), Pattern(2), Pattern(3), Pattern(4), Pattern(5), Pattern(6)};

// Indices of a group's codes, of a block of 32 tokens.
inline void index_block(const Components& c, const Groups& g, int k, int block, uint16_t* to) {
  uint8_t last[4 * INDEX_BITS + SLACK] = {};
  __m512i low = _mm512_setzero_si512(), high = low;
  for (int m = g.begin[k]; m < g.begin[k + 1]; m++) {
    const int i = g.member[m], bits = c.bits[i];
    const uint8_t* codes = c.codes + block * c.block + c.place[i];
    if (c.end - codes < 4 * INDEX_BITS + SLACK) memcpy(last, codes, 4 * bits), codes = last;
    const __m512i mask = _mm512_set1_epi32((1 << bits) - 1);
    const __m128i shift = _mm_cvtsi32_si128(g.shift[m]);
    low = _mm512_or_si512(low, _mm512_sll_epi32(_mm512_and_si512(spread(codes, PATTERNS[bits]), mask), shift));
    high = _mm512_or_si512(high, _mm512_sll_epi32(_mm512_and_si512(spread(codes + 2 * bits, PATTERNS[bits]), mask), shift));
  }
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(low));
  _mm256_storeu_si256((__m256i*)(to + 16), _mm512_cvtepi32_epi16(high));
}

// Indices of `count` tokens, a strip of all groups after another, in the order that they are read.
inline void index_components(const Components& c, const Groups& g, int first, int last, int from, int count, uint16_t* index) {
  const int stop = (from + count + TOGETHER - 1) / TOGETHER;
  const int ahead = c.place[first], bytes = c.place[last - 1] + 4 * c.bits[last - 1] - ahead;
  alignas(64) uint16_t blocks[STRIP + 2 * TOGETHER];
  for (int t = 0; t < count; t += STRIP) {
    const int block = (from + t) / TOGETHER, n = stop - block < STRIP / TOGETHER + 1 ? stop - block : STRIP / TOGETHER + 1;
    for (int b = block + 4; b < block + 8 && b < stop; b++)
      for (int i = 0; i < bytes + 64; i += 64) __builtin_prefetch(c.codes + b * c.block + ahead + i);
    for (int k = 0; k < g.count; k++, index += STRIP) {
      for (int b = 0; b < n; b++)
        if (from % TOGETHER || b < STRIP / TOGETHER) index_block(c, g, k, block + b, blocks + b * TOGETHER);
      memcpy(index, blocks + from % TOGETHER, STRIP * sizeof(uint16_t));
    }
  }
}

// Every member's points by the index that its code is in, ENTRIES each. They are packed to words by an instruction that takes four numbers
// of one vector and then of the next, so place 16 v + i of 32 has entry 8 (i / 4) + 4 v + i % 4.
inline void entries_of(const Components& c, const Groups& g, float* points) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  for (int m = 0; m < g.begin[g.count]; m++)
    for (int v = 0; v < ENTRIES / W; v++, points += W) {
      const int i = g.member[m];
      const __m512i entry = _mm512_add_epi32(lane, _mm512_set1_epi32(v / 2 * 32 + v % 2 * 4));
      const __m512i code = _mm512_srl_epi32(entry, _mm_cvtsi32_si128(g.shift[m])), mask = _mm512_set1_epi32((1 << c.bits[i]) - 1);
      _mm512_storeu_ps(points, _mm512_i32gather_ps(_mm512_and_si512(code, mask), c.points + c.table[i], 4));
    }
}

// Steps of all columns.
inline void steps_of(const Rows& rows, const Groups& g, const float* points, float* step) {
  const int dim = padded(rows.dim);
  for (int d = 0; d < dim; d += W) store(step + d, V{});
  for (int m = 0; m < g.begin[g.count]; m++) {
    __m512 most = _mm512_setzero_ps();
    for (int v = 0; v < ENTRIES / W; v++, points += W) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(points)));
    const float weight = _mm512_reduce_max_ps(most) / LARGEST_SUM;
    const float* basis = rows.basis + int64_t(g.member[m]) * dim;
    for (int d = 0; d < dim; d += W) store(step + d, load(step + d) + (V)_mm512_abs_ps((__m512)load(basis + d)) * weight);
  }
}

// Tables of two columns, of each group one: its low parts, then the others.
inline void tables_of(const Rows& rows, const Groups& g, const float* points, const int* columns, const float* step, int16_t* out) {
  const int dim = padded(rows.dim);
  const __m512i mask = _mm512_set1_epi32((1 << LOW_BITS) - 1);
  float over[2];
  for (int c = 0; c < 2; c++) over[c] = step[columns[c]] == 0 ? 0 : 1 / step[columns[c]];
  for (int k = 0; k < g.count; k++, out += 2 * ENTRIES) {
    V x[2][ENTRIES / W] = {};
    for (int m = g.begin[k]; m < g.begin[k + 1]; m++) {
      const float* basis = rows.basis + int64_t(g.member[m]) * dim;
      for (int c = 0; c < 2; c++)
        for (int i = 0; i < ENTRIES / W; i++) x[c][i] += load(points + m * ENTRIES + i * W) * (basis[columns[c]] * over[c]);
    }
    for (int c = 0; c < 2; c++)
      for (int i = 0; i < 2; i++) {
        int16_t* to = out + c * g.count * 2 * ENTRIES + i * 32;
        const __m512i u = _mm512_cvtps_epi32((__m512)x[c][2 * i]), v = _mm512_cvtps_epi32((__m512)x[c][2 * i + 1]);
        _mm512_storeu_si512(to, _mm512_packs_epi32(_mm512_and_si512(u, mask), _mm512_and_si512(v, mask)));
        _mm512_storeu_si512(to + ENTRIES, _mm512_packs_epi32(_mm512_srai_epi32(u, LOW_BITS), _mm512_srai_epi32(v, LOW_BITS)));
      }
  }
}

// Sums, in steps, of COLUMNS neighbouring columns' tables for NB times 32 tokens.
template <int COLUMNS, int NB>
inline void sums_by_index(const int16_t* tables, int groups, const uint16_t* index, V (*out)[2 * NB]) {
  __m512i low[COLUMNS][NB], high[COLUMNS][NB];
  for (int c = 0; c < COLUMNS; c++)
    for (int n = 0; n < NB; n++) low[c][n] = high[c][n] = _mm512_setzero_si512();
  for (int k = 0; k < groups; k++, tables += 2 * ENTRIES, index += STRIP)
    for (int c = 0; c < COLUMNS; c++) {
      const int16_t* own = tables + int64_t(c) * groups * 2 * ENTRIES;
      const __m512i a = _mm512_load_si512(own), b = _mm512_load_si512(own + 32);
      const __m512i u = _mm512_load_si512(own + 64), v = _mm512_load_si512(own + 96);
      for (int n = 0; n < NB; n++) {
        const __m512i at = _mm512_loadu_si512(index + n * 32);
        low[c][n] = _mm512_add_epi16(low[c][n], _mm512_permutex2var_epi16(a, at, b));
        high[c][n] = _mm512_add_epi16(high[c][n], _mm512_permutex2var_epi16(u, at, v));
        // Keeps GCC from moving the sums between registers: 5 % of the attention.
        asm("" : "+v"(low[c][n]), "+v"(high[c][n]));
      }
    }
  auto together = [](__m256i rest, __m256i low) {
    return (V)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_cvtepi16_epi32(rest), LOW_BITS), _mm512_cvtepu16_epi32(low)));
  };
  for (int c = 0; c < COLUMNS; c++)
    for (int n = 0; n < NB; n++) {
      out[c][2 * n] = together(_mm512_castsi512_si256(high[c][n]), _mm512_castsi512_si256(low[c][n]));
      out[c][2 * n + 1] = together(_mm512_extracti64x4_epi64(high[c][n], 1), _mm512_extracti64x4_epi64(low[c][n], 1));
    }
}

template <int N>
struct Blocks {
  static constexpr int value = N;
};

// Floats that `score_groups` needs.
inline size_t groups_scratch(const Problem& p) {
  const int64_t row = p.span + 2 * TOGETHER;
  const int64_t made = MAX_DIM * ENTRIES + 2 * MOST_GROUPS * ENTRIES + MOST_GROUPS * (p.span + STRIP) / 2;
  return made + p.dim * (p.padded_rows + 1) + (MOST_WIDE + COLUMNS) * row;
}

// Scores of one head's queries with `count` tokens, rows of `span`; cosines and then sines are rows of `angle_row`, from this token on.
// Whether tables are worth it.
inline bool score_groups(
    const Problem& p, int head, int token, int count, const float* cos, int64_t angle_row, float* scratch, float* scores) {
  const Rows& keys = p.keys;
  const Components& c = keys.components;
  Groups g;
  if (!group_components(c, c.first[head], c.first[head + 1], g)) return false;
  const int from = p.k_from + token, R = p.padded_rows, dim = p.dim, columns = (keys.dim + 1) / 2 * 2;
  const int64_t row = p.span + 2 * TOGETHER;
  float *points = scratch, *step = points + MAX_DIM * ENTRIES, *q = step + dim, *wide = q + R * dim, *x = wide + MOST_WIDE * row;
  auto* tables = reinterpret_cast<int16_t*>(x + COLUMNS * row);
  auto* indices = reinterpret_cast<uint16_t*>(tables + 2 * MOST_GROUPS * 2 * ENTRIES);
  const float *mean = keys.basis + int64_t(c.first[keys.heads] + head) * dim, *given = p.turned + int64_t(head) * R * dim;
  entries_of(c, g, points);
  steps_of(keys, g, points, step);
  index_components(c, g, c.first[head], c.first[head + 1], from, count, indices);
  for (int i = 0; i < g.wide; i++) decode_component(c, g.wides[i], from, count, wide + i * row);
  wide += from % TOGETHER;
  // Pairs that are rotated, then what is not.
  int order[MAX_DIM + 2], n = 0;
  for (int j = 0; j < p.half; j++) order[n++] = p.rope_first + j, order[n++] = p.rope_first + p.half + j;
  for (int d = 0; d < columns; d++)
    if (d < p.rope_first || d >= p.rope_first + 2 * p.half) order[n++] = d;
  for (int r = 0; r < R; r++) {
    for (int i = 0; i < columns; i++) q[r * dim + i] = given[r * dim + order[i]];
    memset(scores + r * p.span, 0, sizeof(float) * padded(count));
  }
  const float one[4] = {1, 1, 1, 1};
  for (int first = 0; first < columns; first += COLUMNS) {
    const int own = columns - first < COLUMNS ? columns - first : COLUMNS;
    for (int i = first; i < first + own; i += 2) {
      tables_of(keys, g, points, order + i, step, tables);
      const bool turned = i < 2 * p.half;
      auto strip = [&](auto blocks, int t, int at) {
        constexpr int NB = decltype(blocks)::value;
        V pair[2][2 * NB];
        sums_by_index<2, NB>(tables, g.count, indices + int64_t(t) * g.count + at, pair);
        for (int k = 0; k < 2; k++) {
          const int d = order[i + k];
          for (V& sum : pair[k]) sum = sum * step[d] + mean[d];
          for (int w = 0; w < g.wide; w++) {
            const float weight = keys.basis[int64_t(g.wides[w]) * dim + d];
            for (int j = 0; j < 2 * NB; j++) pair[k][j] += load(wide + w * row + t + at + j * W) * weight;
          }
        }
        const float *turn = cos + i / 2 * angle_row + t + at, *other = turn + p.half * angle_row;
        float *a = x + (i - first) * row + t + at, *b = a + row;
        for (int j = 0; j < 2 * NB; j++) {
          const V u = pair[0][j], v = pair[1][j], c = turned ? load(turn + j * W) : all(1.0f), s = turned ? load(other + j * W) : V{};
          store(a + j * W, u * c - v * s);
          store(b + j * W, u * s + v * c);
        }
      };
      int t = 0;
      for (; t + STRIP <= count; t += STRIP) strip(Blocks<STRIP / 32>(), t, 0);
      for (int at = 0; t + at < count; at += 32) strip(Blocks<1>(), t, at);
    }
    for (int r = 0; r < R; r += 4)
      add_sums({q + r * dim + first, dim}, R < 4 ? R : 4, one, {x, row}, own, padded(count), scores + r * p.span, p.span);
  }
  return true;
}

#else

constexpr bool GROUPED = false;
inline size_t groups_scratch(const Problem&) { return 0; }
inline bool score_groups(const Problem&, int, int, int, const float*, int64_t, float*, float*) { return false; }

#endif

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
