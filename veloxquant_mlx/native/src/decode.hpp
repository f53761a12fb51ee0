// Rows of codes to rows of floats, a tile of tokens at a time.
#pragma once
#include "codewords.hpp"
#include "components.hpp"
#include "floats.hpp"
#include "lookup.hpp"
#include "problem.hpp"
#include "sides.hpp"
#include "simd.hpp"
#include "sylvester.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
#define KVTOOL_DECODES_AT_ONCE
// 32 neighbouring codes of four bits as `Planes` takes them: bytes 4 i to 4 i + 3 of both halves are eight neighbours.
inline Words spread_fours(const uint8_t* codes) {
  const __m256i twice = _mm256_setr_epi8(
      0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13, 2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
  const __m256i x = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes)), twice);
  return (Words)_mm256_blendv_epi8(x, _mm256_srli_epi16(x, 4), _mm256_set1_epi16(int16_t(0xff00)));
}
#endif

template <int BITS, bool TABLE>
void decode_codes(const Stage& stage, int head, int from, int count, int dim, bool add, float* out) {
  const Lookup<BITS> lookup(stage.table);
#if defined(KVTOOL_DECODES_AT_ONCE)
  const Planes planes(BITS == 4 ? stage.table : nullptr);
#endif
  const int width = padded(dim), bytes = (dim * BITS + 7) / 8;
  uint8_t last[MAX_DIM + 2 * SLACK];
  for (int t = 0; t < count; t++, out += width) {
    const uint8_t* codes = stage.codes + head * stage.head + (from + t) * stage.row;
    if (stage.end - codes < width * BITS / 8 + SLACK) {
      memset(last, 0, sizeof last);
      memcpy(last, codes, bytes);
      codes = last;
    }
    int i = 0;
#if defined(KVTOOL_DECODES_AT_ONCE)
    if constexpr (BITS == 4)
      for (; i + 32 <= width; i += 32) {
        V x[4];
        planes.values<0>(spread_fours(codes + i / 2), x);
        for (int j = 0; j < 4; j++) store(out + i + j * W, add ? load(out + i + j * W) + x[j] : x[j]);
      }
#endif
    for (; i < width; i += W) {
      const V x = lookup.template vector<TABLE>(codes, i / W);
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

// A step and a zero for each channel, shared by `group` tokens.
void affine_by_channel(const Rows& rows, int head, int from, int count, float* out) {
  const int dim = rows.dim, width = padded(dim);
  const int64_t groups = (rows.count + rows.group - 1) / rows.group;
  alignas(64) float step[MAX_DIM], zero[MAX_DIM];
  for (int t = 0; t < count;) {
    const int group = (from + t) / rows.group, next = (group + 1) * rows.group - from, stop = next < count ? next : count;
    widen(rows.step, (head * groups + group) * dim, dim, step);
    widen(rows.zero, (head * groups + group) * dim, dim, zero);
    for (; t < stop; t++, out += width) {
      int i = 0;
      for (; i + W <= dim; i += W) store(out + i, load(out + i) * load(step + i) + load(zero + i));
      for (; i < dim; i++) out[i] = out[i] * step[i] + zero[i];
    }
  }
}

// A step and a zero for each group of channels of a token.
void affine_by_token(const Rows& rows, int head, int from, int count, float* out) {
  const int dim = rows.dim, width = padded(dim), groups = (dim + rows.group - 1) / rows.group;
  for (int t = 0; t < count; t++, out += width) {
    const int64_t at = (int64_t(head) * rows.count + from + t) * groups;
    for (int g = 0; g < groups; g++) {
      const float step = one_of(rows.step, at + g), zero = one_of(rows.zero, at + g);
      int i = g * rows.group;
      const int stop = i + rows.group < dim ? i + rows.group : dim;
      for (; i + W <= stop; i += W) store(out + i, load(out + i) * step + zero);
      for (; i < stop; i++) out[i] = out[i] * step + zero;
    }
  }
}

__attribute__((noinline)) void decode_from_components(const Rows& rows, int head, int from, int count, float* out) {
  constexpr int ROW = TILE + 2 * TOGETHER;
  alignas(64) float y[MAX_DIM * ROW];
  const int* first = rows.components.first + head;
  decode_components(rows.components, first[0], first[1], from, count, y, ROW);
  rows_from_components(rows, head, {y + from % TOGETHER, ROW}, out);
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

__attribute__((noinline)) void decode_words(const Rows& rows, int head, int from, int count, float* out) {
  if (rows.words.form != Form::PARTS) return decode_codewords(rows, head, from, count, out);
  alignas(64) float y[MAX_DIM * TILE];
  decode_parts(rows, head, from, count, y);
  rows_from_components(rows, head, {y, TILE}, out);
}

// Rows of unit length times sqrt(D) from their signs: each block of D is turned back by two rotations.
__attribute__((noinline)) void decode_signs(const Rows& rows, int head, int from, int count, float* out) {
  const int dim = rows.dim, width = padded(dim);
  const float factor = __builtin_sqrtf(1.57079633f) / (dim * __builtin_sqrtf(float(dim)) * rows.blocks);
  alignas(64) float signs[MAX_BLOCKS * MAX_DIM + W], x[MAX_DIM];
  for (int t = 0; t < count; t++, out += width) {
    decode_codes<1, true>(rows.stage[0], head, from + t, 1, rows.blocks * dim, false, signs);
    for (int i = 0; i < width; i++) out[i] = 0;
    for (int b = 0; b < rows.blocks; b++) {
      const float *second = rows.turns + (2 * b + 1) * dim, *first = second - dim;
      memcpy(x, signs + b * dim, dim * sizeof(float));
      transform(rows, x);
      for (int i = 0; i < dim; i++) x[i] *= second[i];
      transform(rows, x);
      for (int i = 0; i < dim; i++) out[i] += x[i] * first[i];
    }
    for (int i = 0; i < dim; i++) out[i] *= factor;
  }
}

// Points of `count` rows, each padded to a multiple of 16 by finite numbers.
void points(const Rows& rows, int head, int from, int count, float* out) {
  if (rows.type == Type::COMPONENTS) return decode_from_components(rows, head, from, count, out);
  if (rows.type == Type::CODEWORDS) return decode_words(rows, head, from, count, out);
  if (rows.type == Type::SIGNS) return decode_signs(rows, head, from, count, out);
  if (rows.type != Type::CODES) return decode_floats(rows, head, from, count, out);
  for (int i = 0; i < rows.stages; i++) decode_stage(rows.stage[i], head, from, count, rows.dim, i > 0, out);
  if (!rows.step) return;
  rows.by_token ? affine_by_token(rows, head, from, count, out) : affine_by_channel(rows, head, from, count, out);
}

// Points to rows: scale, rotation back and mean.
void to_rows(const Rows& rows, int head, int from, int count, float* out) {
  const int dim = rows.dim, width = padded(dim);
  if (!rows.scale && !rows.signs) return;
  const float norm = rows.signs ? 1 / __builtin_sqrtf(float(dim)) : 1;
  const float* signs = rows.signs + head * rows.signs_head;
  for (int t = 0; t < count; t++, out += width) {
    const float stored = rows.scale ? one_of(rows.scale, head * int64_t(rows.count) + from + t) : 1;
    const float scale = rows.scale.wide ? stored : __builtin_fabsf(stored), factor = scale * norm;
    const float* mean = rows.mean && !__builtin_signbit(stored) ? rows.mean + int64_t(head) * dim : nullptr;
    if (rows.signs) transform(rows, out);
    int i = 0;
    for (; i + W <= dim; i += W) {
      V x = load(out + i) * factor;
      if (rows.signs) x *= load(signs + i);
      if (mean) x += load(mean + i);
      store(out + i, x);
    }
    for (; i < dim; i++) {
      const float x = out[i] * factor * (rows.signs ? signs[i] : 1);
      out[i] = mean ? x + mean[i] : x;
    }
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
