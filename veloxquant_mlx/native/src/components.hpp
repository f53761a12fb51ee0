// Codes of components to rows of floats, one component of many tokens after another.
#pragma once
#include "lookup.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// Values of codes W i to W i + W - 1 of a block.
template <int BITS>
inline V points_of_block(const Lookup<BITS>& lookup, const uint8_t* codes, int i) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Eight codes of up to four bits are in one word: a shift alone brings each to its lane.
  if constexpr (BITS <= 4) {
    int32_t word;
    memcpy(&word, codes + i * BITS, 4);
    const __m256i at = _mm256_srlv_epi32(
        _mm256_set1_epi32(word), _mm256_setr_epi32(0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS));
    return lookup.of((Words)at);
  }
#endif
  return lookup.template vector<true>(codes, i);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Points of more bits than a lane shuffle sees, which would be gathered one by one, as planes of their bytes: a byte shuffle looks up one
// byte of 32 codes among 16 points, and interleaving makes them floats.
constexpr bool planes_of(int bits) { return bits == 5 || bits == 6; }

// Of `count` components, of each 16 points their lowest bytes, then the others', in as much memory as the points.
inline void make_planes(const Components& c, int count, uint8_t* planes) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int i = 0; i < count; i++) {
    if (!planes_of(c.bits[i])) continue;
    for (int at = c.table[i]; at < c.table[i] + (1 << c.bits[i]); at += 16) {
      __m128i x[4];
      for (int k = 0; k < 4; k++) x[k] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(c.points + at + 4 * k)), order);
      for (int half = 0; half < 2; half++) {
        const __m128i a = half ? _mm_unpackhi_epi32(x[0], x[1]) : _mm_unpacklo_epi32(x[0], x[1]);
        const __m128i b = half ? _mm_unpackhi_epi32(x[2], x[3]) : _mm_unpacklo_epi32(x[2], x[3]);
        __m128i* to = (__m128i*)(planes + 4 * int64_t(at)) + 2 * half;
        _mm_storeu_si128(to, _mm_unpacklo_epi64(a, b)), _mm_storeu_si128(to + 1, _mm_unpackhi_epi64(a, b));
      }
    }
  }
}

// Where the codes lie of which interleaving makes whole vectors, in the first 16 codes: each as the two bytes it is in, and what moves it
// to the upper end of these.
struct Spreading {
  alignas(32) uint8_t bytes[32];
  alignas(32) uint16_t up[16];

  constexpr explicit Spreading(int bits) : bytes(), up() {
    for (int i = 0; i < 16; i++) {
      const int code = i % 4 + i / 8 * 4 + i % 8 / 4 * 8, at = code * bits;
      bytes[2 * i] = at / 8, bytes[2 * i + 1] = at / 8 + 1, up[i] = 1 << (16 - bits - at % 8);
    }
  }
};

// A block of codes, with SLACK bytes behind it.
template <int BITS>
inline void decode_block(const uint8_t* codes, const uint8_t* planes, float* out) {
  static constexpr Spreading TO{BITS};
  constexpr int TABLES = 1 << (BITS - 4);
  __m256i half[2];
  for (int i = 0; i < 2; i++) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(codes + i * 2 * BITS)));
    const __m256i words = _mm256_shuffle_epi8(both, _mm256_load_si256((const __m256i*)TO.bytes));
    half[i] = _mm256_srli_epi16(_mm256_mullo_epi16(words, _mm256_load_si256((const __m256i*)TO.up)), 16 - BITS);
  }
  const __m256i index = _mm256_packus_epi16(half[0], half[1]);
  __m256i at[TABLES], x[4];
  // The uppermost bit, which makes a byte zero, is set of indices into other tables.
  for (int k = 0; k < TABLES; k++) at[k] = _mm256_add_epi8(_mm256_xor_si256(index, _mm256_set1_epi8(char(16 * k))), _mm256_set1_epi8(0x70));
  for (int j = 0; j < 4; j++) {
    auto look_up = [&](int k) {
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)planes + 4 * k + j)), at[k]);
    };
    x[j] = look_up(0);
    for (int k = 1; k < TABLES; k++) x[j] = _mm256_or_si256(x[j], look_up(k));
  }
  for (int upper = 0; upper < 2; upper++, out += 2 * W) {
    const __m256i ab = upper ? _mm256_unpackhi_epi8(x[0], x[1]) : _mm256_unpacklo_epi8(x[0], x[1]);
    const __m256i cd = upper ? _mm256_unpackhi_epi8(x[2], x[3]) : _mm256_unpacklo_epi8(x[2], x[3]);
    store(out, (V)_mm256_unpacklo_epi16(ab, cd)), store(out + W, (V)_mm256_unpackhi_epi16(ab, cd));
  }
}
#else
constexpr bool planes_of(int) { return false; }
#endif

template <int BITS>
inline __attribute__((always_inline)) void decode_component(
    const Components& c, const uint8_t* codes, int table, int blocks, float* out) {
  const Lookup<BITS> lookup(c.points + table);
  for (int b = 0; b < blocks; b++, codes += c.block, out += TOGETHER) {
    uint8_t last[4 * BITS + SLACK];
    const bool near_end = c.end - codes < 4 * BITS + SLACK;
    if (near_end) memcpy(last, codes, 4 * BITS), memset(last + 4 * BITS, 0, SLACK);
    const uint8_t* own = near_end ? last : codes;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (planes_of(BITS))
      if (c.planes) {
        decode_block<BITS>(own, c.planes + 4 * int64_t(table), out);
        continue;
      }
#endif
    for (int i = 0; i < TOGETHER / W; i++) store(out + i * W, points_of_block<BITS>(lookup, own, i));
  }
}

// Components first .. last of tokens from .. from + count, each `row` floats from the one before; the first token at out + from % 32. Up to
// BEHIND floats behind them are finite, for whoever reads whole tiles.
template <int BEHIND = TOGETHER>
inline void decode_components(const Components& c, int first, int last, int from, int count, float* out, int64_t row) {
  const int block = from / TOGETHER, blocks = (from + count + TOGETHER - 1) / TOGETHER - block;
  for (int start = first, stop; start < last; start = stop) {
    // Neighbours mostly have as many bits.
    for (stop = start + 1; stop < last && c.bits[stop] == c.bits[start];) stop++;
    with_bits(c.bits[start], [&](auto bits) {
      for (int i = start; i < stop; i++, out += row) {
        decode_component<decltype(bits)::value>(c, c.codes + block * c.block + c.place[i], c.table[i], blocks, out);
        for (int t = 0; t < BEHIND; t += W) store(out + blocks * TOGETHER + t, V{});
      }
    });
  }
}

inline void decode_component(const Components& c, int i, int from, int count, float* out) {
  decode_components(c, i, i + 1, from, count, out, 0);
}

// Codes of neighbouring components in blocks of tokens, asked for a few lines of the cache at a time while others are worked on: they are
// apart, so that no machine foresees them.
struct CodesAhead {
  const uint8_t* at = nullptr;
  int64_t block = 0;
  int bytes = 0, blocks = 0, done = 0;

  CodesAhead() = default;
  // Of components first .. last, none of them without bits, of tokens from .. from + count.
  CodesAhead(const Components& c, int first, int last, int from, int count) {
    if (first >= last || count <= 0) return;
    at = c.codes + from / TOGETHER * c.block + c.place[first], block = c.block;
    bytes = c.place[last - 1] + 4 * c.bits[last - 1] - c.place[first], blocks = (from + count + TOGETHER - 1) / TOGETHER - from / TOGETHER;
  }

  void next(int lines) {
    for (; lines > 0 && blocks > 0; lines--) {
      __builtin_prefetch(at + (done < bytes ? done : bytes - 1), 0, 2);
      if (done < bytes) done += 64;
      else done = 0, at += block, blocks--;
    }
  }
};

// Rows of a tile of tokens from their components y, one after another: y times the basis, and the mean.
inline void rows_from_components(const Rows& rows, int head, Matrix y, float* out) {
  constexpr int DB = at_once<4>();
  const int* first = rows.components.first;
  const int dim = padded(rows.dim), count = first[head + 1] - first[head];
  const Matrix basis{rows.basis + int64_t(first[head]) * dim, dim}, mean{rows.basis + int64_t(first[rows.heads] + head) * dim, 0};
  const float one[4] = {1, 1, 1, 1};
  // As many columns at a time as fit beside the components in the nearest cache.
  int d = 0;
  for (; d + DB * W <= dim; d += DB * W)
    for (int t = 0; t < TILE; t += 4) some_sums<4, DB>(y.at + t, 1, y.row, one, mean, basis, count, d, out + t * dim, dim);
  for (; d < dim; d += W)
    for (int t = 0; t < TILE; t += 4) some_sums<4, 1>(y.at + t, 1, y.row, one, mean, basis, count, d, out + t * dim, dim);
}

// The entries of a query by the keys' components, and its product with their mean.
inline float to_components(const Rows& rows, int head, const float* q, float* to) {
  const int* first = rows.components.first;
  const int dim = padded(rows.dim), count = first[head + 1] - first[head];
  auto product = [&](int row) {
    const float* x = rows.basis + int64_t(row) * dim;
    float sum = 0;
    for (int i = 0; i < rows.dim; i++) sum += q[i] * x[i];
    return sum;
  };
  for (int i = 0; i < count; i++) to[i] = product(first[head] + i);
  return product(first[rows.heads] + head);
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
