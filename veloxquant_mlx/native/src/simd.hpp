// A vector of W floats, and the few operations of which GCC's and Clang's vector types know none. One source for every level.
#pragma once
#include <cstdint>
#include <cstring>

#include "problem.hpp"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(KVTOOL_USE_NEON)
#include <arm_neon.h>
#endif

// Each level's functions are in a namespace of its own, beside its `Level`.
#define KVTOOL_JOINED(x) in_##x
#define KVTOOL_JOIN(x) KVTOOL_JOINED(x)
#define KVTOOL_INSIDE KVTOOL_JOIN(KVTOOL_LEVEL)

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef float VU __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline V load(const float* at) { return *reinterpret_cast<const VU*>(at); }
inline void store(float* at, V x) { *reinterpret_cast<VU*>(at) = x; }
inline V all(float x) { return x - V{}; }  // 0 + x would be an addition: it is not -0 where x is
inline int padded(int size) { return (size + 15) / 16 * 16; }  // to whole vectors of every level

// Cosines of a row's angles; the sines follow.
inline const float* angles_of(const Angles& a, int row) {
  const int at = a.first + row;
  return a.pages[at / a.each] + int64_t(at % a.each) * 2 * a.half;
}

inline float bfloat(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline float half(uint16_t x) {
  // The exponent is moved by a product, exact for subnormals too; what is not finite has the largest exponent.
  uint32_t bits = uint32_t(x & 0x7fff) << 13;
  float value;
  memcpy(&value, &bits, 4);
  value *= 5.192296858534828e33f;  // 2^112
  memcpy(&bits, &value, 4);
  if ((x & 0x7c00) == 0x7c00) bits = 0x7f800000u | uint32_t(x & 0x3ff) << 13;
  bits |= uint32_t(x & 0x8000) << 16;
  memcpy(&value, &bits, 4);
  return value;
}

#if defined(__AVX512F__)

inline V load_bfloat(const uint16_t* at) {
  return (V)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}
inline V load_half(const uint16_t* at) { return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }

// Sums of 16 vectors, one a lane.
inline V sums(const V* x) {
  __m512 y[4];
  for (int i = 0; i < 4; i++) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
    __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
    y[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  }
  __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(y[0], y[1], 0x44), _mm512_shuffle_f32x4(y[0], y[1], 0xEE));
  __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(y[2], y[3], 0x44), _mm512_shuffle_f32x4(y[2], y[3], 0xEE));
  return (V)_mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

// Sylvester's transform of each vector by itself.
inline V hadamard(V v) {
  __m512 x = (__m512)v;
  const __m512 one = _mm512_set1_ps(1), minus = _mm512_set1_ps(-1);
  x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xAAAA, one, minus), _mm512_permute_ps(x, 0xB1));
  x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xCCCC, one, minus), _mm512_permute_ps(x, 0x4E));
  x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xF0F0, one, minus), _mm512_shuffle_f32x4(x, x, 0xB1));
  x = _mm512_fmadd_ps(x, _mm512_mask_blend_ps(0xFF00, one, minus), _mm512_shuffle_f32x4(x, x, 0x4E));
  return (V)x;
}

#elif defined(__AVX2__)

inline V load_bfloat(const uint16_t* at) {
  return (V)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
}
inline V load_half(const uint16_t* at) { return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }

inline V sums(const V* x) {
  __m256 y[2];
  for (int i = 0; i < 2; i++)
    y[i] = _mm256_hadd_ps(_mm256_hadd_ps(x[4 * i], x[4 * i + 1]), _mm256_hadd_ps(x[4 * i + 2], x[4 * i + 3]));
  return (V)_mm256_add_ps(_mm256_permute2f128_ps(y[0], y[1], 0x20), _mm256_permute2f128_ps(y[0], y[1], 0x31));
}

inline V hadamard(V v) {
  __m256 x = (__m256)v;
  x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xB1));
  x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4E));
  x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 0x01));
  return (V)x;
}

#elif defined(KVTOOL_USE_NEON)

inline V load_bfloat(const uint16_t* at) { return (V)vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(at), 16)); }
inline V load_half(const uint16_t* at) { return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }

inline V sums(const V* x) {
  const float32x4_t ab = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]), cd = vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]);
  return (V)vpaddq_f32(ab, cd);
}

inline V hadamard(V v) {
  float32x4_t x = (float32x4_t)v;
  x = vfmaq_f32(vrev64q_f32(x), x, (float32x4_t)V{1, -1, 1, -1});
  x = vfmaq_f32(vextq_f32(x, x, 2), x, (float32x4_t)V{1, 1, -1, -1});
  return (V)x;
}

#else

inline V load_bfloat(const uint16_t* at) { return V{bfloat(at[0]), bfloat(at[1]), bfloat(at[2]), bfloat(at[3])}; }
// As `half`, all at once.
inline V load_half(const uint16_t* at) {
  const VI x{at[0], at[1], at[2], at[3]}, high = x & 0x7c00;
  const V value = (V)((x & 0x7fff) << 13) * 5.192296858534828e33f;
  const VI bits = high == 0x7c00 ? 0x7f800000 | (x & 0x3ff) << 13 : (VI)value;
  return (V)(bits | (x & 0x8000) << 16);
}

inline V sums(const V* x) {
  V out;
  for (int i = 0; i < W; i++) out[i] = (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
  return out;
}

inline V hadamard(V x) {
  float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
  return V{a + c, b + d, a - c, b - d};
}

#endif

// The low bytes of W numbers below 256.
inline void store_bytes(uint8_t* at, VI x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64((__m128i*)at, _mm_packus_epi16(words, words));
#else
  for (int i = 0; i < W; i++) at[i] = uint8_t(x[i]);
#endif
}

// Values of a table of 16, at indices below 16.
struct Table16 {
#if defined(__AVX512F__)
  __m512 values;
  explicit Table16(const float* at) : values(_mm512_loadu_ps(at)) {}
  V operator()(VI index) const { return (V)_mm512_permutexvar_ps((__m512i)index, values); }
#elif defined(__AVX2__)
  __m256 low, high;
  explicit Table16(const float* at) : low(_mm256_loadu_ps(at)), high(_mm256_loadu_ps(at + 8)) {}
  V operator()(VI index) const {
    const __m256i i = (__m256i)index;
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
    return (V)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i), upper);
  }
#else
  const float* values;
  explicit Table16(const float* at) : values(at) {}
  V operator()(VI index) const {
    V x;
    for (int i = 0; i < W; i++) x[i] = values[index[i]];
    return x;
  }
#endif
};

// e^x for x <= 0, 0 below the normal numbers; NaN stays. Relative error below 2e-7.
inline V exp_negative(V x) {
  V low = all(-87.0f);
  VI under = x < low;
  V clamped = under ? low : x;
  V magic = all(12582912.0f);  // adding it rounds to an integer
  V n = (clamped * 1.44269504f + magic) - magic;
  V r = clamped - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  V p = all(1.0f / 5040) * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  VI exponent = (__builtin_convertvector(n == n ? n : V{}, VI) + 127) << 23;
  V power;
  memcpy(&power, &exponent, sizeof power);
  V value = p * power;
  return under ? V{} : value;
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
