// Scores of codes of one or two bits, in AVX2: four bits of a row are looked up as the sum that they make of a query's entries.
//
//     sum of q[d] points[d] = sum over fours of sums[four][its bits]
//
// The 16 sums are whole numbers of 24 bits, the unit 2^-23 of the largest of a query, in planes of 6 bits: a shuffle of bytes looks a plane
// up for 32 tokens. Four of these bytes are added as bytes, and from then on as 16 bits, so that nothing is rounded but the 16 sums.
#pragma once
#include "lookup.hpp"
#include "products.hpp"
#include "signs.hpp"
#include "words.hpp"

#if defined(__AVX2__) && !defined(__AVX512F__)
namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int PLANES = 4, PLANE_BITS = 6;
constexpr int TAKEN = 32;                // tokens at a time
constexpr int FEWEST = 64;               // tokens that are worth making the sums
constexpr int MOST_FOURS = MAX_DIM / 2;  // of codes of two bits
constexpr float LARGEST = 8388000;       // in units: below 2^23, so that MOST_FOURS of them are below 2^31

// Fours of a row: as many as 16 bits hold, so that four can be taken at a time.
inline int fours_of(int dim, int bits) { return (dim * bits + 15) / 16 * 4; }

// The sums of RB queries, [RB][fours][PLANES][16], and their units.
template <int RB>
struct Fours {
  alignas(64) int8_t planes[RB * MOST_FOURS * PLANES * 16];
  float unit[RB];
  int count;

  // Of codes of BITS bits that stand for `values`, or for themselves. Entries of q behind a row's are 0.
  template <int BITS>
  void make(Matrix q, int dim, const float* values) {
    constexpr int CODES = 4 / BITS;
    V value[CODES][2];
    for (int j = 0; j < CODES; j++)
      for (int i = 0; i < 16; i++) {
        const int code = i >> j * BITS & ((1 << BITS) - 1);
        value[j][i / W][i % W] = values ? values[code] : float(code);
      }
    count = fours_of(dim, BITS);
    for (int r = 0; r < RB; r++) unit[r] = one<CODES>(q.at + r * q.row, value, planes + r * count * PLANES * 16);
  }

 private:
  template <int CODES>
  float one(const float* q, const V (*value)[2], int8_t* to) const {
    alignas(64) float sums[MOST_FOURS * 16];
    V most{}, odd{};  // 0, or not a number where a sum is none or infinite
    for (int f = 0; f < count; f++)
      for (int h = 0; h < 2; h++) {
        V x{};
        for (int j = 0; j < CODES; j++) x += q[f * CODES + j] * value[j][h];
        store(sums + f * 16 + h * W, x);
        odd += x * 0;
        const V size = (V)((VI)x & 0x7fffffff);
        most = size > most ? size : most;
      }
    float largest = 1e-30f, none = 0;
    for (int i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest, none += odd[i];
    const __m256 per = _mm256_set1_ps(LARGEST / largest);
    const __m256i low = _mm256_set1_epi32((1 << PLANE_BITS) - 1), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int f = 0; f < count; f++, to += PLANES * 16) {
      __m256i x[2];
      for (int h = 0; h < 2; h++) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(sums + f * 16 + h * W), per));
        x[h] = _mm256_add_epi32(whole, _mm256_set1_epi32(1 << 23));
      }
      for (int p = 0; p < PLANES; p += 2) {
        __m256i two[2];
        for (int i = 0; i < 2; i++) {
          const auto plane = [&](__m256i of) { return _mm256_and_si256(_mm256_srli_epi32(of, (p + i) * PLANE_BITS), low); };
          two[i] = _mm256_packs_epi32(plane(x[0]), plane(x[1]));
        }
        const __m256i bytes = _mm256_packus_epi16(two[0], two[1]);
        _mm256_store_si256((__m256i*)(to + p * 16), _mm256_permutevar8x32_epi32(bytes, order));
      }
    }
    return largest / LARGEST + none;
  }
};

// The fours of a word of TAKEN tokens. Tokens are in the order in which even bytes and odd ones, widened, come out one after another.
inline void fours_of_word(const uint32_t* words, Bytes* out) {
  const __m256i alike = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  __m256i x[4], y[4];
  for (int i = 0; i < 4; i++) x[i] = _mm256_shuffle_epi8((__m256i)load_words(words + i * W), alike);
  for (int i = 0; i < 4; i += 2) y[i] = _mm256_unpacklo_epi8(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_epi8(x[i], x[i + 1]);
  for (int i = 0; i < 2; i++) x[2 * i] = _mm256_unpacklo_epi64(y[i], y[i + 2]), x[2 * i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
  const __m256i low = _mm256_set1_epi8(15);
  for (int i = 0; i < 4; i++)
    out[2 * i] = (Bytes)_mm256_and_si256(x[i], low), out[2 * i + 1] = (Bytes)_mm256_and_si256(_mm256_srli_epi16(x[i], 4), low);
}

// scores[r] = base[r] + <q[r], points> of TAKEN tokens.
template <int RB>
void dots_of_fours(const Fours<RB>& sums, const uint32_t* words, int64_t word_row, const float* base, float* scores, int64_t row) {
  alignas(64) Bytes fours[MOST_FOURS];
  for (int f = 0; f < sums.count; f += 8, words += word_row) fours_of_word(words, fours + f);
  const int8_t* planes = sums.planes;
  for (int r = 0; r < RB; r++) {
    __m256i even[PLANES], odd[PLANES];
    for (int p = 0; p < PLANES; p++) even[p] = odd[p] = _mm256_setzero_si256();
    for (int f = 0; f < sums.count; f += 4, planes += 4 * PLANES * 16)
      for (int p = 0; p < PLANES; p++) {
        const auto found = [&](int i) { return pick(planes + (i * PLANES + p) * 16, fours[f + i]); };
        const __m256i four = (__m256i)((found(0) + found(1)) + (found(2) + found(3)));
        even[p] = _mm256_add_epi16(even[p], _mm256_and_si256(four, _mm256_set1_epi16(255)));
        odd[p] = _mm256_add_epi16(odd[p], _mm256_srli_epi16(four, 8));
      }
    const __m256i places = _mm256_set1_epi32(1 | 1 << (16 + PLANE_BITS)), zero = _mm256_set1_epi32(int(uint32_t(sums.count) << 23));
    const auto write = [&](int i, __m256i low, __m256i high) {
      const __m256i upper = _mm256_slli_epi32(_mm256_madd_epi16(high, places), 2 * PLANE_BITS);
      const __m256i all_of_it = _mm256_add_epi32(_mm256_madd_epi16(low, places), upper);
      store(scores + r * row + i * W, (V)_mm256_cvtepi32_ps(_mm256_sub_epi32(all_of_it, zero)) * sums.unit[r] + base[r]);
    };
    write(0, _mm256_unpacklo_epi16(even[0], even[1]), _mm256_unpacklo_epi16(even[2], even[3]));
    write(1, _mm256_unpacklo_epi16(odd[0], odd[1]), _mm256_unpacklo_epi16(odd[2], odd[3]));
    write(2, _mm256_unpackhi_epi16(even[0], even[1]), _mm256_unpackhi_epi16(even[2], even[3]));
    write(3, _mm256_unpackhi_epi16(odd[0], odd[1]), _mm256_unpackhi_epi16(odd[2], odd[3]));
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
#endif
