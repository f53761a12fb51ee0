// Codes packed and unpacked, values to codes and back, at one SIMD level; compiled once for each.
//
// No product is contracted with a sum (CMakeLists.txt): every level gives the same codes.
#include "streams.hpp"

#include "reals.hpp"
#include "simd.hpp"
#include "sylvester.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int AT_ONCE = 2048;  // codes whose passes stay in the first cache
constexpr int BLOCK = 64;      // values

// Codes of b bits in bytes to half as many bytes of 2 b bits, and back.
inline void halve(const uint8_t* from, int bytes, int bits, uint8_t* to) {
  const uint8_t mask = uint8_t((1 << bits) - 1);
  for (int i = 0; i < bytes; i++) to[i] = uint8_t((from[2 * i] & mask) | (from[2 * i + 1] & mask) << bits);
}
inline void twice(const uint8_t* from, int bytes, int bits, uint8_t* to) {
  const uint8_t mask = uint8_t((1 << bits) - 1);
  for (int i = 0; i < bytes; i++) to[2 * i] = from[i] & mask, to[2 * i + 1] = uint8_t(from[i] >> bits) & mask;
}

// 1, 2 or 4 bits; count a multiple of 8.
void pack_powers(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  uint8_t pairs[AT_ONCE / 2], fours[AT_ONCE / 4];
  for (int64_t at = 0; at < count; at += AT_ONCE) {
    const int some = int(count - at < AT_ONCE ? count - at : AT_ONCE);
    uint8_t* to = out + at * bits / 8;
    if (bits == 4) {
      halve(codes + at, some / 2, 4, to);
      continue;
    }
    halve(codes + at, some / 2, bits, pairs);
    halve(pairs, some / 4, 2 * bits, bits == 2 ? to : fours);
    if (bits == 1) halve(fours, some / 8, 4, to);
  }
}

void unpack_powers(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
  uint8_t pairs[AT_ONCE / 2], fours[AT_ONCE / 4];
  for (int64_t at = 0; at < count; at += AT_ONCE) {
    const int some = int(count - at < AT_ONCE ? count - at : AT_ONCE);
    const uint8_t* from = packed + at * bits / 8;
    if (bits == 4) {
      twice(from, some / 2, 4, codes + at);
      continue;
    }
    if (bits == 1) twice(from, some / 8, 4, fours);
    twice(bits == 2 ? from : fours, some / 4, 2 * bits, pairs);
    twice(pairs, some / 2, bits, codes + at);
  }
}

// Eight codes in the bytes of a number to 8 B neighbouring bits, and back.
template <int B>
struct Eight {
  static constexpr uint64_t BYTES = 0x0001000100010001u * ((uint64_t(1) << B) - 1);
  static constexpr uint64_t PAIRS = 0x0000000100000001u * ((uint64_t(1) << 2 * B) - 1);
  static constexpr uint64_t FOURS = (uint64_t(1) << 4 * B) - 1;
  static uint64_t joined(uint64_t x) {
    x = (x & BYTES) | (x & BYTES << 8) >> (8 - B);
    x = (x & PAIRS) | (x & PAIRS << 16) >> (16 - 2 * B);
    return (x & FOURS) | (x & FOURS << 32) >> (32 - 4 * B);
  }
  static uint64_t apart(uint64_t x) {
    x = (x & FOURS) | (x & FOURS << 4 * B) << (32 - 4 * B);
    x = (x & PAIRS) | (x & PAIRS << 2 * B) << (16 - 2 * B);
    return (x & BYTES) | (x & BYTES << B) << (8 - B);
  }
};

template <int B>
void pack_stream(const uint8_t* codes, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i += 8, out += B) {
    uint64_t x;
    memcpy(&x, codes + i, 8);
    x = Eight<B>::joined(x);
    memcpy(out, &x, B);
  }
}

template <int B>
void unpack_stream(const uint8_t* packed, int64_t count, uint8_t* codes) {
  uint64_t x;
  int64_t i = 0;
  for (; i + 24 <= count; i += 8, packed += B) {  // what is read beyond these codes is of the next
    memcpy(&x, packed, 8);
    x = Eight<B>::apart(x);
    memcpy(codes + i, &x, 8);
  }
  for (; i < count; i += 8, packed += B) {
    x = 0, memcpy(&x, packed, B);
    x = Eight<B>::apart(x);
    memcpy(codes + i, &x, 8);
  }
}

// Count a multiple of 32 / B.
template <int B>
void pack_words(const uint8_t* codes, int64_t count, uint8_t* out) {
  constexpr int PER = 32 / B;
  for (int64_t i = 0; i < count; i += PER, out += 4) {
    uint32_t word = 0;
    for (int k = 0; k < PER; k++) word |= uint32_t(codes[i + k] & ((1 << B) - 1)) << (B * k);
    memcpy(out, &word, 4);
  }
}

template <int B>
void unpack_words(const uint8_t* packed, int64_t count, uint8_t* codes) {
  constexpr int PER = 32 / B;
  for (int64_t i = 0; i < count; i += PER, packed += 4) {
    uint32_t word;
    memcpy(&word, packed, 4);
    for (int k = 0; k < PER; k++) codes[i + k] = uint8_t(word >> (B * k) & ((1u << B) - 1));
  }
}

template <bool WORDS, int B>
void pack_whole(const uint8_t* codes, int64_t count, uint8_t* out) {
  if constexpr (WORDS)
    pack_words<B>(codes, count, out);
  else
    pack_stream<B>(codes, count, out);
}

template <bool WORDS, int B>
void unpack_whole(const uint8_t* packed, int64_t count, uint8_t* codes) {
  if constexpr (WORDS)
    unpack_words<B>(packed, count, codes);
  else
    unpack_stream<B>(packed, count, codes);
}

template <bool WORDS>
void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  switch (bits) {
    case 3: return pack_whole<WORDS, 3>(codes, count, out);
    case 5: return pack_whole<WORDS, 5>(codes, count, out);
    case 6: return pack_whole<WORDS, 6>(codes, count, out);
    case 7: return pack_whole<WORDS, 7>(codes, count, out);
    case 8: memcpy(out, codes, size_t(count)); return;
    default: return pack_powers(codes, count, bits, out);
  }
}

template <bool WORDS>
void unpack_codes(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
  switch (bits) {
    case 3: return unpack_whole<WORDS, 3>(packed, count, codes);
    case 5: return unpack_whole<WORDS, 5>(packed, count, codes);
    case 6: return unpack_whole<WORDS, 6>(packed, count, codes);
    case 7: return unpack_whole<WORDS, 7>(packed, count, codes);
    case 8: memcpy(codes, packed, size_t(count)); return;
    default: return unpack_powers(packed, count, bits, codes);
  }
}

// Codes that end at a byte (a word) together, and how many bytes they are.
inline int codes_together(int bits, bool words) { return words ? 32 / bits : 8; }

void pack(const uint8_t* codes, int64_t count, int bits, bool words, uint8_t* out) {
  const int together = codes_together(bits, words), bytes = words ? 4 : bits, left = int(count % together);
  const int64_t whole = count - left;
  words ? pack_codes<true>(codes, whole, bits, out) : pack_codes<false>(codes, whole, bits, out);
  if (!left) return;
  uint8_t last[32] = {}, packed[8] = {};
  memcpy(last, codes + whole, left);
  words ? pack_codes<true>(last, together, bits, packed) : pack_codes<false>(last, together, bits, packed);
  memcpy(out + whole / together * bytes, packed, words ? 4 : (left * bits + 7) / 8);
}

void unpack(const uint8_t* packed, int64_t count, int bits, bool words, uint8_t* codes) {
  const int together = codes_together(bits, words), bytes = words ? 4 : bits, left = int(count % together);
  const int64_t whole = count - left;
  words ? unpack_codes<true>(packed, whole, bits, codes) : unpack_codes<false>(packed, whole, bits, codes);
  if (!left) return;
  uint8_t last[8] = {}, apart[32];
  memcpy(last, packed + whole / together * bytes, words ? 4 : (left * bits + 7) / 8);
  words ? unpack_codes<true>(last, together, bits, apart) : unpack_codes<false>(last, together, bits, apart);
  memcpy(codes + whole, apart, left);
}

// Codes of BLOCK values; the first `count` are stored.
void nearest_block(const Nearest& n, const float* x, int count, uint8_t* codes) {
  constexpr int N = 4;
  uint8_t found[BLOCK];
  for (int at = 0; at < BLOCK; at += N * W) {
    V values[N], best[N];
    VI index[N];
    for (int k = 0; k < N; k++) values[k] = load(x + at + k * W), best[k] = all(__builtin_inff()), index[k] = VI{};
    for (int c = 0; c < n.count; c++)
      for (int k = 0; k < N; k++) {
        const V apart = values[k] - n.centroids[c];
        const V distance = (V)((VI)apart & 0x7fffffff);
        const VI nearer = distance < best[k];
        best[k] = nearer ? distance : best[k];
        index[k] = nearer ? c - VI{} : index[k];
      }
    for (int k = 0; k < N; k++) store_bytes(found + at + k * W, index[k]);
  }
  memcpy(codes, found, count);
}

void nearest(const Nearest& n, int64_t from, int64_t to) {
  alignas(64) float x[MAX_ROTATED + BLOCK] = {};
  const int dim = n.dim ? n.dim : BLOCK;
  for (int64_t at = from; at < to; at += dim) {
    const int count = int(to - at < dim ? to - at : dim);
    widened(n.x, at, count, x);
    if (n.dim) {
      for (int i = 0; i < dim; i++) x[i] *= n.signs[i];
      sylvester(x, dim);
      for (int i = 0; i < dim; i++) x[i] *= n.scale;
    }
    for (int i = 0; i < count; i += BLOCK) nearest_block(n, x + i, count - i < BLOCK ? count - i : BLOCK, n.codes + at + i);
  }
}

void look_up(const uint8_t* codes, int64_t count, const uint16_t* table, uint16_t* out) {
  for (int64_t i = 0; i < count; i++) out[i] = table[codes[i]];
}

// Bit t of byte b is 1 where value 8 b + t is >= 0; NaN is not.
void pack_signs(const float* x, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; i += 8, x += 8) {
    uint8_t byte = 0;
    for (int t = 0; t < 8; t++) byte |= uint8_t((x[t] >= 0) << t);
    out[i / 8] = byte;
  }
}

void rotated(const Rotated& r, int64_t from, int64_t to) {
  alignas(64) float x[MAX_ROTATED];
  const int dim = r.dim;
  const float scale = 1 / __builtin_sqrtf(float(dim));
  for (int64_t row = from; row < to; row++) {
    widened(r.x, row * dim, dim, x);
    for (int i = 0; i < dim; i++) x[i] *= r.signs[i];
    sylvester(x, dim);
    for (int i = 0; i < dim; i++) x[i] *= scale;
    pack_signs(x, dim, r.packed + row * (dim / 8));
    float sums[8] = {};
    for (int i = 0; i < dim; i += 8)
      for (int t = 0; t < 8; t++) sums[t] += __builtin_fabsf(x[i + t]);
    float sum = 0;
    for (float one : sums) sum += one;
    r.size[row] = sum / float(dim);
  }
}

// How many of `boundaries` are below each value; of a NaN none.
void count_below(const float* x, int count, const float* boundaries, int many, uint8_t* codes) {
  for (int i = 0; i < count; i++) codes[i] = 0;
  for (int b = 0; b < many; b++)
    for (int i = 0; i < count; i++) codes[i] = uint8_t(codes[i] + (x[i] > boundaries[b]));
}

void two_stages(const TwoStages& s, int64_t from, int64_t to) {
  alignas(64) float x[MAX_ROTATED];
  uint16_t halves[MAX_ROTATED];
  uint8_t codes[MAX_ROTATED];
  const int dim = s.dim, many = (1 << s.bits) - 1, per = 32 / s.bits, bytes = (dim + per - 1) / per * 4;
  for (int64_t row = from; row < to; row++) {
    widened(s.x, row * dim, dim, x);
    count_below(x, dim, s.first, many, codes);
    pack(codes, dim, s.bits, true, s.packed1 + row * bytes);
    for (int i = 0; i < dim; i++) x[i] -= s.centroids[codes[i]];
    if (s.left != Type::FLOAT32) {
      narrowed(x, dim, s.left, 0, reinterpret_cast<uint8_t*>(halves));
      widened({s.left, reinterpret_cast<const uint8_t*>(halves)}, 0, dim, x);
    }
    count_below(x, dim, s.second, many, codes);
    pack(codes, dim, s.bits, true, s.packed2 + row * bytes);
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE

#define KVTOOL_STREAMER_(x) x##_streamer
#define KVTOOL_STREAMER(x) KVTOOL_STREAMER_(x)
const Streamer KVTOOL_STREAMER(KVTOOL_LEVEL) = {
    KVTOOL_INSIDE::pack,    KVTOOL_INSIDE::unpack,     KVTOOL_INSIDE::nearest,   KVTOOL_INSIDE::look_up,
    KVTOOL_INSIDE::rotated, KVTOOL_INSIDE::two_stages, KVTOOL_INSIDE::pack_signs};

}  // namespace kvtool
