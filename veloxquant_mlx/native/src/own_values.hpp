// What of the values is their own: sums over tokens of w size z, the tokens in the lanes.
#pragma once
#include "components.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int WORD_BITS = 4;  // W codes of so many bits are in one word: a shift alone brings each to its lane

// Codes W i to W i + W - 1 of a block: the word that they are in, within the block, and the shifts.
template <int BITS>
struct InWord {
  int byte[TOGETHER / W];
  alignas(32) int32_t shifts[TOGETHER / W][W];

  constexpr InWord() : byte(), shifts() {
    for (int i = 0; i < TOGETHER / W; i++) {
      byte[i] = i * BITS < 4 * BITS - 4 ? i * BITS : 4 * BITS - 4;
      for (int j = 0; j < W; j++) shifts[i][j] = 8 * (i * BITS - byte[i]) + j * BITS;
    }
  }
};

// sums[r][j] += sum over tokens of blocks of weights[r][t] z[j][t] for RB rows and W / RB components from `first` on: points are looked up
// as they are multiplied.
template <int BITS, int RB>
void add_coded_dots(const Components& c, int first, int block, int blocks, Matrix weights, float* sums, int64_t row) {
  constexpr int TB = W / RB;
  static constexpr InWord<BITS> AT;
  const uint8_t* codes[TB];
  // A look-up has no state to begin with, so that all are named; those beyond TB repeat others, and none reads them.
  const auto lookup_of = [&](int j) { return Lookup<BITS>(c.points + c.table[first + j % TB]); };
  for (int j = 0; j < TB; j++) codes[j] = c.codes + block * c.block + c.place[first + j];
  const Lookup<BITS> lookups[W] = {
      lookup_of(0), lookup_of(1), lookup_of(2), lookup_of(3), lookup_of(4), lookup_of(5), lookup_of(6), lookup_of(7)};
  V sum[W] = {};
  for (int b = 0; b < blocks; b++)
    for (int i = 0; i < TOGETHER / W; i++) {
      V z[TB];
      for (int j = 0; j < TB; j++) {
        int32_t word;
        memcpy(&word, codes[j] + b * c.block + AT.byte[i], 4);
        const __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_load_si256((const __m256i*)AT.shifts[i]));
        z[j] = lookups[j].of((Words)index);
      }
      for (int r = 0; r < RB; r++) {
        const V weight = load(weights.at + r * weights.row + b * TOGETHER + i * W);
        for (int j = 0; j < TB; j++) sum[r * TB + j] += weight * z[j];
      }
    }
  float together[W];
  store(together, kvtool::KVTOOL_INSIDE::sums(sum));
  for (int r = 0; r < RB; r++)
    for (int j = 0; j < TB; j++) sums[r * row + j] += together[r * TB + j];
}

// Of as many components as have codes of BITS bits, of all rows. Returns how many it took: whole groups of W.
template <int BITS>
int add_coded_dots(const Components& c, int first, int last, int block, int blocks, Matrix weights, int rows, float* sums, int64_t row) {
  const int stop = first + (last - first) / W * W;
  for (int r = 0; r < rows;) {
    const int left = rows - r, step = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const Matrix own{weights.at + r * weights.row, weights.row};
    float* to = sums + r * row;
    for (int i = first; i < stop; i += W / step) {
      if (step == 4) add_coded_dots<BITS, 4>(c, i, block, blocks, own, to + i - first, row);
      if (step == 2) add_coded_dots<BITS, 2>(c, i, block, blocks, own, to + i - first, row);
      if (step == 1) add_coded_dots<BITS, 1>(c, i, block, blocks, own, to + i - first, row);
    }
    r += step;
  }
  return stop - first;
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool

#endif
