// Floats to the type of a result, rounded to nearest even.
#pragma once
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

inline uint16_t to_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);
  if (bits < 0x38800000) {
    // The last bit of 0.5 is that of float16's subnormal numbers: the sum rounds as they do.
    float value;
    memcpy(&value, &bits, 4);
    value += 0.5f;
    memcpy(&bits, &value, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

#if defined(__AVX512F__)
inline void store_half(uint16_t* at, V x) { _mm256_storeu_si256((__m256i*)at, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); }
inline void store_bfloat(uint16_t* at, V x) {
  const __m512i bits = _mm512_castps_si512((__m512)x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i*)at, _mm512_cvtepi32_epi16(rounded));
}
#elif defined(__AVX2__)
inline void store_half(uint16_t* at, V x) { _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)); }
inline void store_bfloat(uint16_t* at, V x) {
  const __m256i bits = _mm256_castps_si256((__m256)x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps((__m256)x, (__m256)x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
  _mm_storeu_si128((__m128i*)at, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
#else
inline void store_half(uint16_t* at, V x) {
  for (int i = 0; i < W; i++) at[i] = to_half(x[i]);
}
inline void store_bfloat(uint16_t* at, V x) {
  for (int i = 0; i < W; i++) at[i] = to_bfloat(x[i]);
}
#endif

template <Type T>
struct Values {
  using Stored = uint16_t;
  static V read(const Stored* at) { return T == Type::FLOAT16 ? load_half(at) : load_bfloat(at); }
  static float one(Stored x) { return T == Type::FLOAT16 ? half(x) : bfloat(x); }
  static void write(Stored* at, V x) { T == Type::FLOAT16 ? store_half(at, x) : store_bfloat(at, x); }
  static Stored from(float x) { return T == Type::FLOAT16 ? to_half(x) : to_bfloat(x); }
};
template <>
struct Values<Type::FLOAT32> {
  using Stored = float;
  static V read(const Stored* at) { return load(at); }
  static float one(Stored x) { return x; }
  static void write(Stored* at, V x) { store(at, x); }
  static Stored from(float x) { return x; }
};

// A row of floats in the type of the result; float16 ends at 65504, and the error of a value close to it must not turn it into Inf.
template <Type T>
void narrow(const float* x, int dim, typename Values<T>::Stored* out) {
  constexpr float most = 65504;
  int i = 0;
  for (; i + W <= dim; i += W) {
    V v = load(x + i);
    if (T == Type::FLOAT16) v = v > all(most) ? all(most) : v < all(-most) ? all(-most) : v;
    Values<T>::write(out + i, v);
  }
  for (; i < dim; i++) {
    float v = x[i];
    if (T == Type::FLOAT16) v = v > most ? most : v < -most ? -most : v;
    out[i] = Values<T>::from(v);
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
