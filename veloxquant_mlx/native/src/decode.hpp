// Rows of codes to rows of floats, a tile of tokens at a time.
//
// W codes of b bits are W b / 8 whole bytes. Each lane gets the two bytes that its code lies in by one byte shuffle, then a shift;
// a table (in AVX2 one of up to 16 values) is looked up in registers, for a lane shuffle ignores the bits above its index and a table of
// fewer than 16 values is repeated.
#pragma once
#include "problem.hpp"
#include "simd.hpp"
#include "sylvester.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int SLACK = 16;  // bytes that a vector of codes may read beyond its own

inline int code_of(const uint8_t* codes, int bits, int i) {
  int at = i * bits;
  int both = codes[at >> 3] | ((at & 7) + bits > 8 ? codes[(at >> 3) + 1] << 8 : 0);
  return both >> (at & 7) & ((1 << bits) - 1);
}

#if defined(__AVX512F__)

template <int BITS>
struct Lookup {
  __m512i bytes, shifts;
  static constexpr int REGISTERS = BITS <= 4 ? 1 : 1 << (BITS - 4);
  __m512 table[REGISTERS];
  const float* values;

  explicit Lookup(const float* values) : values(values) {
    alignas(64) uint8_t b[64];
    alignas(64) int32_t s[16];
    for (int i = 0; i < 16; i++) {
      int at = i * BITS;
      b[4 * i] = at / 8, b[4 * i + 1] = BITS == 8 ? 0x80 : at / 8 + 1, b[4 * i + 2] = b[4 * i + 3] = 0x80, s[i] = at % 8;
    }
    bytes = _mm512_load_si512(b), shifts = _mm512_load_si512(s);
    if (values)
      for (int i = 0; i < REGISTERS; i++) table[i] = _mm512_loadu_ps(values + 16 * i);
  }

  template <bool TABLE>
  V operator()(const uint8_t* codes) const {
    if constexpr (BITS == 1 && TABLE) {
      uint16_t bits;
      memcpy(&bits, codes, 2);
      return (V)_mm512_mask_blend_ps(bits, _mm512_set1_ps(values[0]), _mm512_set1_ps(values[1]));
    }
    __m512i at = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes)), bytes);
    at = _mm512_srlv_epi32(at, shifts);
    if constexpr (!TABLE) return (V)_mm512_cvtepi32_ps(_mm512_and_si512(at, _mm512_set1_epi32((1 << BITS) - 1)));
    if constexpr (BITS <= 4) return (V)_mm512_permutexvar_ps(at, table[0]);
    // Two registers by five bits, then halves by each bit above.
    __m512 x[REGISTERS / 2 + 1];
    for (int i = 0; i < REGISTERS / 2; i++) x[i] = _mm512_permutex2var_ps(table[2 * i], at, table[2 * i + 1]);
    for (int bit = 5, n = REGISTERS / 4; n > 0; bit++, n /= 2) {
      const __mmask16 upper = _mm512_test_epi32_mask(at, _mm512_set1_epi32(1 << bit));
      for (int i = 0; i < n; i++) x[i] = _mm512_mask_blend_ps(upper, x[2 * i], x[2 * i + 1]);
    }
    return (V)x[0];
  }
};

#elif defined(__AVX2__)

template <int BITS>
struct Lookup {
  __m256i bytes, shifts;
  __m256 table[2];
  const float* values;

  explicit Lookup(const float* values) : values(values) {
    alignas(32) uint8_t b[32];
    alignas(32) int32_t s[8];
    for (int i = 0; i < 8; i++) {
      int at = i * BITS;
      b[4 * i] = at / 8, b[4 * i + 1] = BITS == 8 ? 0x80 : at / 8 + 1, b[4 * i + 2] = b[4 * i + 3] = 0x80, s[i] = at % 8;
    }
    bytes = _mm256_load_si256((const __m256i*)b), shifts = _mm256_load_si256((const __m256i*)s);
    if (values)
      for (int i = 0; i < 2; i++) table[i] = _mm256_loadu_ps(values + 8 * i);
  }

  template <bool TABLE>
  V operator()(const uint8_t* codes) const {
    __m256i at = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)codes)), bytes);
    at = _mm256_srlv_epi32(at, shifts);
    if constexpr (TABLE && BITS <= 3) return (V)_mm256_permutevar8x32_ps(table[0], at);
    if constexpr (TABLE && BITS == 4)
      return (V)_mm256_blendv_ps(
          _mm256_permutevar8x32_ps(table[0], at),
          _mm256_permutevar8x32_ps(table[1], at),
          _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
    at = _mm256_and_si256(at, _mm256_set1_epi32((1 << BITS) - 1));
    if constexpr (TABLE) return (V)_mm256_i32gather_ps(values, at, 4);
    return (V)_mm256_cvtepi32_ps(at);
  }
};

#elif defined(KVTOOL_USE_NEON)

// A table of up to 32 floats is looked up as bytes. Four codes of an odd number of bits start at bit 0 or 4 of a byte.
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
  V operator()(const uint8_t* codes, int phase = 0) const {
    uint32x4_t at = vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(codes), bytes[phase]));
    at = vandq_u32(vshlq_u32(at, shifts[phase]), vdupq_n_u32((1 << BITS) - 1));
    if constexpr (!TABLE) return (V)vcvtq_f32_u32(at);
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
  V operator()(const uint8_t* codes) const {
    uint32_t word;  // W = 4 codes
    memcpy(&word, codes, 4);
    V out;
    for (int i = 0; i < W; i++) {
      int code = word >> (i * BITS) & ((1 << BITS) - 1);
      out[i] = TABLE ? values[code] : float(code);
    }
    return out;
  }
};

#endif

template <int BITS, bool TABLE>
void decode_codes(const Stage& stage, int head, int from, int count, int dim, bool add, float* out) {
  const Lookup<BITS> lookup(stage.table);
  const int width = (dim + 15) / 16 * 16, bytes = (dim * BITS + 7) / 8;
  uint8_t last[MAX_DIM + 2 * SLACK];
  for (int t = 0; t < count; t++, out += width) {
    const uint8_t* codes = stage.codes + head * stage.head + (from + t) * stage.row;
    if (stage.end - codes < width * BITS / 8 + SLACK) {
      memset(last, 0, sizeof last);
      memcpy(last, codes, bytes);
      codes = last;
    }
    for (int i = 0; i < width; i += W) {
      // At W = 4 an odd number of bits starts within a byte: pairs of vectors share their bytes.
      V x;
      if constexpr (W * BITS % 8 == 0) {
        x = lookup.template operator()<TABLE>(codes + i * BITS / 8);
      } else {
#if defined(KVTOOL_USE_NEON)
        x = lookup.template operator()<TABLE>(codes + i * BITS / 8, i / W % 2);
#else
        for (int j = 0; j < W; j++) {
          int code = code_of(codes, BITS, i + j);
          x[j] = TABLE ? stage.table[code] : float(code);
        }
#endif
      }
      store(out + i, add ? load(out + i) + x : x);
    }
  }
}

template <int BITS>
void decode_bits(const Stage& stage, int head, int from, int count, int dim, bool add, float* out) {
  if (stage.table)
    decode_codes<BITS, true>(stage, head, from, count, dim, add, out);
  else
    decode_codes<BITS, false>(stage, head, from, count, dim, add, out);
}

void decode_stage(const Stage& stage, int head, int from, int count, int dim, bool add, float* out) {
  switch (stage.bits) {
    case 1: return decode_bits<1>(stage, head, from, count, dim, add, out);
    case 2: return decode_bits<2>(stage, head, from, count, dim, add, out);
    case 3: return decode_bits<3>(stage, head, from, count, dim, add, out);
    case 4: return decode_bits<4>(stage, head, from, count, dim, add, out);
    case 5: return decode_bits<5>(stage, head, from, count, dim, add, out);
    case 6: return decode_bits<6>(stage, head, from, count, dim, add, out);
    case 7: return decode_bits<7>(stage, head, from, count, dim, add, out);
    default: return decode_bits<8>(stage, head, from, count, dim, add, out);
  }
}

void decode_floats(const Rows& rows, int head, int from, int count, float* out) {
  const int width = (rows.dim + 15) / 16 * 16, whole = rows.dim / W * W;
  for (int t = 0; t < count; t++, out += width) {
    const uint8_t* row = rows.data + head * rows.head + (from + t) * rows.row;
    const float* floats = reinterpret_cast<const float*>(row);
    const uint16_t* words = reinterpret_cast<const uint16_t*>(row);
    if (rows.type == Type::FLOAT32) {
      for (int i = 0; i < whole; i += W) store(out + i, load(floats + i));
      for (int i = whole; i < rows.dim; i++) out[i] = floats[i];
    } else if (rows.type == Type::FLOAT16) {
      for (int i = 0; i < whole; i += W) store(out + i, load_half(words + i));
      for (int i = whole; i < rows.dim; i++) out[i] = half(words[i]);
    } else {
      for (int i = 0; i < whole; i += W) store(out + i, load_bfloat(words + i));
      for (int i = whole; i < rows.dim; i++) out[i] = bfloat(words[i]);
    }
    for (int i = rows.dim; i < width; i++) out[i] = 0;
  }
}

void widen(const uint16_t* from, int count, float* to) {
  int i = 0;
  for (; i + W <= count; i += W) store(to + i, load_bfloat(from + i));
  for (; i < count; i++) to[i] = bfloat(from[i]);
}

// A step and a zero for each channel, shared by `group` tokens.
void affine_by_channel(const Rows& rows, int head, int from, int count, float* out) {
  const int dim = rows.dim, width = (dim + 15) / 16 * 16;
  const int64_t groups = (rows.count + rows.group - 1) / rows.group;
  alignas(64) float step[MAX_DIM], zero[MAX_DIM];
  for (int t = 0; t < count;) {
    const int group = (from + t) / rows.group, next = (group + 1) * rows.group - from, stop = next < count ? next : count;
    widen(rows.step + (head * groups + group) * dim, dim, step);
    widen(rows.zero + (head * groups + group) * dim, dim, zero);
    for (; t < stop; t++, out += width) {
      int i = 0;
      for (; i + W <= dim; i += W) store(out + i, load(out + i) * load(step + i) + load(zero + i));
      for (; i < dim; i++) out[i] = out[i] * step[i] + zero[i];
    }
  }
}

// A step and a zero for each group of channels of a token.
void affine_by_token(const Rows& rows, int head, int from, int count, float* out) {
  const int dim = rows.dim, width = (dim + 15) / 16 * 16, groups = (dim + rows.group - 1) / rows.group;
  for (int t = 0; t < count; t++, out += width) {
    const int64_t at = (int64_t(head) * rows.count + from + t) * groups;
    for (int g = 0; g < groups; g++) {
      const float step = bfloat(rows.step[at + g]), zero = bfloat(rows.zero[at + g]);
      int i = g * rows.group;
      const int stop = i + rows.group < dim ? i + rows.group : dim;
      for (; i + W <= stop; i += W) store(out + i, load(out + i) * step + zero);
      for (; i < stop; i++) out[i] = out[i] * step + zero;
    }
  }
}

// Points of `count` rows, each padded to a multiple of 16 by finite numbers.
void points(const Rows& rows, int head, int from, int count, float* out) {
  if (rows.type != Type::CODES) return decode_floats(rows, head, from, count, out);
  for (int i = 0; i < rows.stages; i++) decode_stage(rows.stage[i], head, from, count, rows.dim, i > 0, out);
  if (!rows.step) return;
  rows.by_token ? affine_by_token(rows, head, from, count, out) : affine_by_channel(rows, head, from, count, out);
}

// sqrt(D) T x in place, D = odd 2^k.
void transform(const Rows& rows, float* x) {
  const int power = rows.dim / rows.odd;
  for (int i = 0; i < rows.odd; i++) sylvester(x + i * power, power);
  if (rows.odd == 1) return;
  float all_of_it[MAX_DIM];
  memcpy(all_of_it, x, rows.dim * sizeof(float));
  for (int i = 0; i < rows.odd; i++)
    for (int j = 0; j < power; j++) {
      float sum = 0;
      for (int l = 0; l < rows.odd; l++) sum += rows.hartley[i * rows.odd + l] * all_of_it[l * power + j];
      x[i * power + j] = sum;
    }
}

// Points to rows: scale, rotation back and mean.
void to_rows(const Rows& rows, int head, int from, int count, float* out) {
  const int dim = rows.dim, width = (dim + 15) / 16 * 16;
  if (!rows.scale) return;
  const float norm = rows.signs ? 1 / __builtin_sqrtf(float(dim)) : 1;
  for (int t = 0; t < count; t++, out += width) {
    const uint16_t stored = rows.scale[head * int64_t(rows.count) + from + t];
    const float scale = bfloat(stored & 0x7fff), factor = scale * norm, centred = rows.mean && stored < 0x8000 ? 1 : 0;
    if (rows.signs) transform(rows, out);
    const float* mean = rows.mean ? rows.mean + int64_t(head) * dim : nullptr;
    int i = 0;
    for (; i + W <= dim; i += W) {
      V x = load(out + i) * factor;
      if (rows.signs) x *= load(rows.signs + i);
      if (mean) x += load(mean + i) * centred;
      store(out + i, x);
    }
    for (; i < dim; i++) out[i] = out[i] * factor * (rows.signs ? rows.signs[i] : 1) + (mean ? mean[i] * centred : 0);
  }
}

// Points of keys before RoPE to rows as cached, all of a row in registers: D = VECTORS W = 2^k, and every entry in a pair.
template <int VECTORS>
void to_whole_keys(const Rows& rows, int head, int from, int count, const float* angles, float* out) {
  constexpr int dim = VECTORS * W;
  const float norm = 1 / __builtin_sqrtf(float(dim));
  const float* mean = rows.mean ? rows.mean + int64_t(head) * dim : nullptr;
  for (int t = 0; t < count; t++, out += dim, angles += dim) {
    const uint16_t stored = rows.scale[head * int64_t(rows.count) + from + t];
    const float factor = bfloat(stored & 0x7fff) * norm;
    V v[VECTORS];
    butterflies<VECTORS>(out, v);
    for (int i = 0; i < VECTORS; i++) v[i] *= load(rows.signs + W * i) * factor;
    if (mean && stored < 0x8000)
      for (int i = 0; i < VECTORS; i++) v[i] += load(mean + W * i);
    for (int i = 0; i < VECTORS / 2; i++) {
      V a = v[i], b = v[i + VECTORS / 2], cos = load(angles + W * i), sin = load(angles + dim / 2 + W * i);
      store(out + W * i, a * cos - b * sin);
      store(out + dim / 2 + W * i, a * sin + b * cos);
    }
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
