// Neighbouring codes of b bits to floats, a vector at a time.
//
// W codes are W b / 8 whole bytes. Each lane gets the two bytes that its code lies in by one byte shuffle, then a shift; a table (in AVX2
// one of up to 16 values) is looked up in registers, for a lane shuffle ignores the bits above its index and a table of fewer than 16
// values is repeated.
#pragma once
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

typedef uint32_t Words __attribute__((vector_size(4 * W)));

template <int N>
struct Number {
  static constexpr int value = N;
};

// f(Number<bits>()).
template <class F>
inline void with_bits(int bits, F f) {
  switch (bits) {
    case 1: return f(Number<1>());
    case 2: return f(Number<2>());
    case 3: return f(Number<3>());
    case 4: return f(Number<4>());
    case 5: return f(Number<5>());
    case 6: return f(Number<6>());
    case 7: return f(Number<7>());
    default: return f(Number<8>());
  }
}

constexpr int SLACK = 16;  // bytes that a vector of codes may read beyond its own

#if defined(__AVX2__)

// Where the code of each lane lies: its two bytes, in the lowest of the lane's four, and the bits below it. Bytes of 0x80 give zero.
struct Pattern {
  alignas(64) uint8_t bytes[64];
  alignas(64) int32_t shifts[16];

  constexpr explicit Pattern(int bits) : bytes(), shifts() {
    for (int i = 0; i < 16; i++) {
      const int at = i * bits;
      bytes[4 * i] = at / 8, bytes[4 * i + 1] = bits == 8 ? 0x80 : at / 8 + 1, bytes[4 * i + 2] = bytes[4 * i + 3] = 0x80;
      shifts[i] = at % 8;
    }
  }
};

#if defined(__AVX512F__)
typedef __m512i Codes;
inline Codes spread(const uint8_t* codes, const Pattern& to) {
  const __m512i both = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes));
  return _mm512_srlv_epi32(_mm512_shuffle_epi8(both, _mm512_load_si512(to.bytes)), _mm512_load_si512(to.shifts));
}
inline V numbers(Codes at, int bits) { return (V)_mm512_cvtepi32_ps(_mm512_and_si512(at, _mm512_set1_epi32((1 << bits) - 1))); }
#else
typedef __m256i Codes;
inline Codes spread(const uint8_t* codes, const Pattern& to) {
  const __m256i both = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)codes));
  const __m256i bytes = _mm256_load_si256((const __m256i*)to.bytes), shifts = _mm256_load_si256((const __m256i*)to.shifts);
  return _mm256_srlv_epi32(_mm256_shuffle_epi8(both, bytes), shifts);
}
inline V numbers(Codes at, int bits) { return (V)_mm256_cvtepi32_ps(_mm256_and_si256(at, _mm256_set1_epi32((1 << bits) - 1))); }
#endif

template <int BITS>
struct Lookup {
  static constexpr Pattern PATTERN{BITS};
  static constexpr int REGISTERS = (1 << BITS) <= W ? 1 : (1 << BITS) / W;
  static constexpr int HELD = W == 8 && REGISTERS > 2 ? 1 : REGISTERS;  // AVX2 gathers from larger tables
  V table[HELD];
  const float* values;

  explicit Lookup(const float* values) : values(values) {
    for (int i = 0; i < HELD; i++) table[i] = values ? load(values + W * i) : V{};
  }

  template <bool TABLE>
  V at(const uint8_t* codes) const {
#if defined(__AVX512F__)
    if constexpr (BITS == 1 && TABLE) {
      uint16_t bits;
      memcpy(&bits, codes, 2);
      return (V)_mm512_mask_blend_ps(bits, _mm512_set1_ps(values[0]), _mm512_set1_ps(values[1]));
    }
#endif
    const Codes at = spread(codes, PATTERN);
    if constexpr (!TABLE)
      return numbers(at, BITS);
    else
      return of((Words)at);
  }

  // The values of codes in the lowest bits of each lane, whatever is above.
  V of(Words words) const {
    const Codes at = (Codes)words;
#if defined(__AVX512F__)
    if constexpr (BITS <= 4) return (V)_mm512_permutexvar_ps(at, (__m512)table[0]);
    // Two registers by five bits, then halves by each bit above.
    __m512 x[REGISTERS / 2 + 1];
    for (int i = 0; i < REGISTERS / 2; i++) x[i] = _mm512_permutex2var_ps((__m512)table[2 * i], at, (__m512)table[2 * i + 1]);
    for (int bit = 5, n = REGISTERS / 4; n > 0; bit++, n /= 2) {
      const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(1 << bit));
      for (int i = 0; i < n; i++) x[i] = _mm512_mask_blend_ps(upper, x[2 * i], x[2 * i + 1]);
    }
    return (V)x[0];
#else
    if constexpr (BITS <= 2) return (V)_mm256_permutevar_ps((__m256)table[0], at);  // both halves are the table
    if constexpr (BITS == 3) return (V)_mm256_permutevar8x32_ps((__m256)table[0], at);
    if constexpr (BITS == 4) {
      const __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], at), high = _mm256_permutevar8x32_ps((__m256)table[1], at);
      return (V)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
    }
    return (V)_mm256_i32gather_ps(values, _mm256_and_si256(at, _mm256_set1_epi32((1 << BITS) - 1)), 4);
#endif
  }

  // Codes W i to W i + W - 1.
  template <bool TABLE>
  V vector(const uint8_t* codes, int i) const {
    return at<TABLE>(codes + i * W * BITS / 8);
  }
};

#if !defined(__AVX512F__)
// Values of 4-bit codes, 32 at a time. A table lies as four planes of its floats' bytes: a byte shuffle looks up one byte of 32 values, and
// interleaving makes them floats. That takes half the time of lane shuffles, which see 8 of 16 values each.
struct Planes {
  __m256i of[4];

  // Of 16 values; of none, a code is its number.
  explicit Planes(const float* values) {
    static constexpr float NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m128i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)((values ? values : NUMBERS) + 4 * i)), order);
    for (int half = 0; half < 2; half++) {
      const __m128i a = half ? _mm_unpackhi_epi32(x[0], x[1]) : _mm_unpacklo_epi32(x[0], x[1]);
      const __m128i b = half ? _mm_unpackhi_epi32(x[2], x[3]) : _mm_unpacklo_epi32(x[2], x[3]);
      of[2 * half] = _mm256_broadcastsi128_si256(_mm_unpacklo_epi64(a, b));
      of[2 * half + 1] = _mm256_broadcastsi128_si256(_mm_unpackhi_epi64(a, b));
    }
  }

  // Of the lower or the upper codes of bytes: x[i] are those of bytes 4 i to 4 i + 3 of both halves.
  template <int UPPER>
  inline __attribute__((always_inline)) void values(Words bytes, V* x) const {
    const __m256i codes = (__m256i)(bytes >> uint32_t(4 * UPPER) & 0x0f0f0f0fu);
    const __m256i a = _mm256_shuffle_epi8(of[0], codes), b = _mm256_shuffle_epi8(of[1], codes);
    const __m256i c = _mm256_shuffle_epi8(of[2], codes), d = _mm256_shuffle_epi8(of[3], codes);
    const __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d);
    x[0] = (V)_mm256_unpacklo_epi16(ab, cd), x[1] = (V)_mm256_unpackhi_epi16(ab, cd);
    const __m256i ab1 = _mm256_unpackhi_epi8(a, b), cd1 = _mm256_unpackhi_epi8(c, d);
    x[2] = (V)_mm256_unpacklo_epi16(ab1, cd1), x[3] = (V)_mm256_unpackhi_epi16(ab1, cd1);
  }
};

// The bytes of two vectors of words as `Planes` takes them: in both[i] four of byte 2 i of a, four of b, then of byte 2 i + 1.
inline void pair_bytes(Words a, Words b, Words* both) {
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i x = _mm256_shuffle_epi8((__m256i)a, order), y = _mm256_shuffle_epi8((__m256i)b, order);
  both[0] = (Words)_mm256_unpacklo_epi32(x, y), both[1] = (Words)_mm256_unpackhi_epi32(x, y);
}
#endif

#elif defined(KVTOOL_USE_NEON)

// A table of up to 32 floats is looked up as bytes. Four codes of an odd number of bits start at bit 0 or 4 of a byte: two phases.
template <int BITS>
struct Lookup {
  uint8x16_t bytes[2];
  int32x4_t shifts[2];
  uint8x16x4_t table[2];
  const float* values;

  explicit Lookup(const float* values) : values(values) {
    for (int phase = 0; phase < 2; phase++) {
      uint8_t b[16];
      int32_t s[4];
      for (int i = 0; i < 4; i++) {
        int at = i * BITS + 4 * phase;
        b[4 * i] = at / 8, b[4 * i + 1] = at / 8 + 1, b[4 * i + 2] = b[4 * i + 3] = 0xff, s[i] = -(at % 8);
      }
      bytes[phase] = vld1q_u8(b), shifts[phase] = vld1q_s32(s);
    }
    if (!values) return;
    for (int i = 0; i < (BITS == 5 ? 8 : 4); i++) table[i / 4].val[i % 4] = vreinterpretq_u8_f32(vld1q_f32(values + 4 * i));
  }

  template <bool TABLE>
  V vector(const uint8_t* codes, int i) const {
    const int phase = BITS % 2 ? i % 2 : 0;
    const uint32x4_t both = vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(codes + i * W * BITS / 8), bytes[phase]));
    const uint32x4_t at = vshlq_u32(both, shifts[phase]);
    if constexpr (!TABLE)
      return (V)vcvtq_f32_u32(vandq_u32(at, vdupq_n_u32((1 << BITS) - 1)));
    else
      return of((Words)at);
  }

  V of(Words words) const {
    const uint32x4_t at = vandq_u32((uint32x4_t)words, vdupq_n_u32((1 << BITS) - 1));
    if constexpr (BITS > 5) return V{values[at[0]], values[at[1]], values[at[2]], values[at[3]]};
    const uint8x16_t of = vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100), at, 0x04040404));
    uint8x16_t x;
    if constexpr (BITS <= 2)
      x = vqtbl1q_u8(table[0].val[0], of);
    else
      x = vqtbl4q_u8(table[0], of);
    if constexpr (BITS == 5) x = vqtbx4q_u8(x, table[1], vsubq_u8(of, vdupq_n_u8(64)));
    return (V)vreinterpretq_f32_u8(x);
  }
};

#else

template <int BITS>
struct Lookup {
  const float* values;

  explicit Lookup(const float* values) : values(values) {}

  template <bool TABLE>
  V vector(const uint8_t* codes, int i) const {
    uint32_t word;  // W = 4 codes, from bit 0 or 4 of a byte on
    memcpy(&word, codes + i * W * BITS / 8, 4);
    word >>= i * W * BITS % 8;
    V out;
    for (int j = 0; j < W; j++) {
      int code = word >> (j * BITS) & ((1 << BITS) - 1);
      out[j] = TABLE ? values[code] : float(code);
    }
    return out;
  }

  V of(Words words) const {
    V out;
    for (int j = 0; j < W; j++) out[j] = values[words[j] & ((1 << BITS) - 1)];
    return out;
  }
};

#endif

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
