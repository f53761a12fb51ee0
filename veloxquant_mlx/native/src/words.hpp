// Rows of bytes, turned: the 32-bit words of a row one after another become rows of their own, with the tokens beside each other.
#pragma once
#include "lookup.hpp"
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

inline Words load_words(const uint32_t* at) {
  Words x;
  memcpy(&x, at, sizeof x);
  return x;
}
inline void store_words(uint32_t* at, Words x) { memcpy(at, &x, sizeof x); }

// Memory that is read next, asked for piece by piece while others are worked on: turning waits for memory, and nothing else does.
struct Ahead {
  const uint8_t *at = nullptr, *end = nullptr;
  int64_t piece = 0;
  Ahead* also = nullptr;  // asked for in the same steps

  void next() {
    if (also) also->next();
    for (const uint8_t* stop = end - at < piece ? end : at + piece; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// W rows of W words, `apart` bytes apart, turned; the first `count` of the result are stored.
inline void turn_block(const uint8_t* rows, int64_t apart, int count, uint32_t* out, int64_t row) {
#if defined(__AVX512F__)
  __m512i x[16], y[16];
  for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(rows + i * apart);
  for (int i = 0; i < 16; i += 2) y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]), x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88), y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xDD);
    }
  for (int j = 0; j < 8; j++) {
    // Word j of each quarter: quarters 0 and 2 of the words are in y[j % 4], 1 and 3 in y[j % 4 + 4].
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88), x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xDD);
  }
  for (int j = 0; j < count; j++) _mm512_storeu_si512(out + j * row, x[j]);
#elif defined(__AVX2__)
  __m256i x[8], y[8];
  for (int i = 0; i < 8; i++) x[i] = _mm256_loadu_si256((const __m256i*)(rows + i * apart));
  for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm256_unpacklo_epi64(y[i + j], y[i + j + 2]), x[i + 2 * j + 1] = _mm256_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int j = 0; j < 4; j++) {
    y[j] = _mm256_permute2x128_si256(x[j], x[j + 4], 0x20), y[j + 4] = _mm256_permute2x128_si256(x[j], x[j + 4], 0x31);
  }
  for (int j = 0; j < count; j++) _mm256_storeu_si256((__m256i*)(out + j * row), y[j]);
#else
  for (int j = 0; j < count; j++)
    for (int i = 0; i < W; i++) memcpy(out + j * row + i, rows + i * apart + 4 * j, 4);
#endif
}

// Rows of N words one after another.
template <int N>
void turn_narrow(const uint8_t* from, int count, uint32_t* out, int64_t width) {
  typedef uint32_t Word __attribute__((may_alias, aligned(1)));
  const Word* __restrict words = reinterpret_cast<const Word*>(from);
  uint32_t* __restrict to = out;
  int t = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (N == 4)
    for (; t + W <= count; t += W) {
      // Tokens 0 and 4, 1 and 5, ...: lanes need not change places afterwards.
      const auto* rows = reinterpret_cast<const __m128i*>(from) + t;
      __m256i x[4];
      for (int i = 0; i < 4; i++)
        x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(rows + i)), _mm_loadu_si128(rows + i + 4), 1);
      const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]);
      const __m256i c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
      const __m256i turned[4] = {
          _mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
      for (int k = 0; k < 4; k++) _mm256_storeu_si256((__m256i*)(to + k * width + t), turned[k]);
    }
#endif
  for (; t < count; t++)
    for (int k = 0; k < N; k++) to[k * width + t] = words[N * t + k];
  for (int t = count; t < padded(count); t++)
    for (int k = 0; k < N; k++) to[k * width + t] = words[N * (count - 1) + k];
}

// The words of `count` rows of `bytes` bytes, `row` bytes apart: word k of row t at out[k width + t]. Up to the next multiple of 16 rows
// repeat the last one.
inline void turn_rows(const uint8_t* from, const uint8_t* end, int64_t row, int bytes, int count, uint32_t* out, int64_t width) {
  const int words = (bytes + 3) / 4;
  if (row == bytes && bytes == 8) return turn_narrow<2>(from, count, out, width);
  if (row == bytes && bytes == 16) return turn_narrow<4>(from, count, out, width);
  for (int t = 0; t < padded(count); t += W)
    for (int k = 0; k < words; k += W) {
      const uint8_t* at = from + t * row + 4 * k;
      const int some = words - k < W ? words - k : W;
      if (t + W <= count && end - at >= (W - 1) * row + 4 * W) {
        turn_block(at, row, some, out + k * width + t, width);
        continue;
      }
      // What ends before a vector does, or before W rows.
      uint8_t last[W][4 * W] = {};
      for (int i = 0; i < W; i++)
        memcpy(last[i], t + i < count ? at + i * row : from + (count - 1) * row + 4 * k, bytes - 4 * k < 4 * W ? bytes - 4 * k : 4 * W);
      turn_block(last[0], 4 * W, some, out + k * width + t, width);
    }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
