// Sylvester's matrix of signs, exactly, in bytes: four bits are looked up as what their four signs give.
#pragma once
#include "simd.hpp"

#if defined(__AVX2__)
namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

typedef int8_t Bytes __attribute__((vector_size(4 * W)));
typedef int16_t Shorts __attribute__((vector_size(4 * W)));

#if defined(__AVX512F__)
inline Bytes pick(const int8_t* table, Bytes at) {
  return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)at);
}
inline Shorts pairs(Bytes unsigned_, Bytes signed_) { return (Shorts)_mm512_maddubs_epi16((__m512i)unsigned_, (__m512i)signed_); }
inline VI pairs(Shorts a, Shorts b) { return (VI)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
inline Bytes pick(const int8_t* table, Bytes at) {
  return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)at);
}
inline Shorts pairs(Bytes unsigned_, Bytes signed_) { return (Shorts)_mm256_maddubs_epi16((__m256i)unsigned_, (__m256i)signed_); }
inline VI pairs(Shorts a, Shorts b) { return (VI)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif

// Sylvester's matrix of 4 times the signs that four bits stand for.
struct OfNibbles {
  alignas(16) int8_t of[4][16];

  constexpr OfNibbles() : of() {
    for (int i = 0; i < 4; i++)
      for (int bits = 0; bits < 16; bits++)
        for (int j = 0; j < 4; j++) of[i][bits] += (bits >> j & 1) == ((i & j) != 0 && (i & j) != 3) ? -1 : 1;
  }
};

// Sylvester's matrix of 4 times the four bytes of each lane.
inline void of_bytes(Bytes x, V* out) {
  const Bytes ones = (Bytes)((VI{} + 0x01010101)), minus = (Bytes)(VI{} + int(0xff01ff01)), biased = x ^ (Bytes)(VI{} + int(0x80808080));
  const Shorts one = (Shorts)(VI{} + 0x00010001), other = (Shorts)(VI{} + int(0xffff0001));
  const Shorts sum = pairs(ones, x), difference = pairs(biased, minus);
  out[0] = __builtin_convertvector(pairs(sum, one), V), out[1] = __builtin_convertvector(pairs(difference, one), V);
  out[2] = __builtin_convertvector(pairs(sum, other), V), out[3] = __builtin_convertvector(pairs(difference, other), V);
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
#endif
