// Codes to rows of a cache, and rows of a cache from one rotary embedding to another, at one SIMD level; compiled once for each.
//
//     out[s] = narrow(R_p (scale[s] R^T points[s] + centred[s] mean))          decode_as
//     out[s] = narrow(ratio e^(i (redo - undo)[s]) x[s])                       turn, a pair of entries as a complex number
//
// A tile of 32 tokens at a time, so that nothing but codes is read and nothing but the result is written.
#include "decode.hpp"
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

// --- decoding

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

// A row's rotated entries, half-split, by the angles of its position.
void rotate_row(const Decoding& d, const float* cos, float* x) {
  const int half = d.angles.half;
  const float* sin = cos + half;
  float *a = x + d.rope_first, *b = a + half;
  int i = 0;
  for (; i + W <= half; i += W) {
    V u = load(a + i), v = load(b + i), c = load(cos + i), s = load(sin + i);
    store(a + i, u * c - v * s), store(b + i, u * s + v * c);
  }
  for (; i < half; i++) {
    const float u = a[i], v = b[i];
    a[i] = u * cos[i] - v * sin[i], b[i] = u * sin[i] + v * cos[i];
  }
  if (!d.interleaved) return;
  float both[MAX_DIM];
  for (int j = 0; j < half; j++) both[2 * j] = a[j], both[2 * j + 1] = b[j];
  memcpy(a, both, 2 * half * sizeof(float));
}

// `to_rows` of a head size 2^k whose row fits into registers.
template <int VECTORS>
void to_whole_rows(const Rows& rows, int head, int from, int count, float* out) {
  constexpr int dim = VECTORS * W;
  const float norm = 1 / __builtin_sqrtf(float(dim));
  const float* mean = rows.mean ? rows.mean + int64_t(head) * dim : nullptr;
  for (int t = 0; t < count; t++, out += dim) {
    const uint16_t stored = rows.scale[head * int64_t(rows.count) + from + t];
    const float factor = bfloat(stored & 0x7fff) * norm;
    V v[VECTORS];
    butterflies<VECTORS>(out, v);
    for (int i = 0; i < VECTORS; i++) v[i] *= load(rows.signs + W * i) * factor;
    if (mean && stored < 0x8000)
      for (int i = 0; i < VECTORS; i++) v[i] += load(mean + W * i);
    for (int i = 0; i < VECTORS; i++) store(out + W * i, v[i]);
  }
}

void rebuild(const Rows& rows, int head, int from, int count, float* x) {
  points(rows, head, from, count, x);
  if (rows.scale && rows.signs && rows.odd == 1) {
    if (rows.dim == 4 * W) return to_whole_rows<4>(rows, head, from, count, x);
    if (rows.dim == 8 * W) return to_whole_rows<8>(rows, head, from, count, x);
  }
  to_rows(rows, head, from, count, x);
}

template <Type T>
void decode_typed(const Decoding& d, int head, int start, int stop) {
  using Stored = typename Values<T>::Stored;
  alignas(64) float x[TILE * MAX_DIM];
  const int dim = d.rows.dim, width = (dim + 15) / 16 * 16;
  for (int t = start; t < stop; t += TILE) {
    const int count = stop - t < TILE ? stop - t : TILE;
    rebuild(d.rows, head, d.from + t, count, x);
    Stored* out = reinterpret_cast<Stored*>(d.out) + (int64_t(head) * d.count + t) * dim;
    for (int i = 0; i < count; i++) {
      if (d.angles.pages) rotate_row(d, angles_of(d.angles, t + i), x + i * width);
      narrow<T>(x + i * width, dim, out + i * dim);
    }
  }
}

// --- turning

// cos + i sin = e^(i angle) of a row, times its conjugate of another where there are two.
void phases_of(const Phases* p, int row, int half, float* __restrict cos, float* __restrict sin) {
  const double *hi = p[0].hi + int64_t(p[0].index[row]) * 2 * half, *lo = p[0].lo + int64_t(p[0].low[row]) * 2 * half;
  if (!p[1].hi) {
    for (int i = 0; i < half; i++) {
      cos[i] = float(hi[i] * lo[i] - hi[half + i] * lo[half + i]);
      sin[i] = float(hi[half + i] * lo[i] + hi[i] * lo[half + i]);
    }
    return;
  }
  const double *high = p[1].hi + int64_t(p[1].index[row]) * 2 * half, *low = p[1].lo + int64_t(p[1].low[row]) * 2 * half;
  for (int i = 0; i < half; i++) {
    const double c = hi[i] * lo[i] - hi[half + i] * lo[half + i], s = hi[half + i] * lo[i] + hi[i] * lo[half + i];
    const double back_c = high[i] * low[i] - high[half + i] * low[half + i], back_s = high[half + i] * low[i] + high[i] * low[half + i];
    cos[i] = float(c * back_c + s * back_s), sin[i] = float(s * back_c - c * back_s);
  }
}

// Cosines and sines that a row is turned by.
void turning_angles(const Turning& t, int row, float* __restrict cos) {
  const int half = t.half;
  float* __restrict sin = cos + half;
  if (t.phases[0].hi) return phases_of(t.phases, row, half, cos, sin);
  const float *undo = t.undo.pages ? angles_of(t.undo, row) : nullptr, *redo = t.redo.pages ? angles_of(t.redo, row) : nullptr;
  if (!undo || !redo) {
    memcpy(cos, undo ? undo : redo, 2 * half * sizeof(float));
    if (undo)
      for (int i = 0; i < half; i++) sin[i] = -sin[i];
    return;
  }
  const float *undo_sin = undo + half, *redo_sin = redo + half;
  for (int i = 0; i < half; i++) {
    cos[i] = redo[i] * undo[i] + redo_sin[i] * undo_sin[i];
    sin[i] = redo_sin[i] * undo[i] - redo[i] * undo_sin[i];
  }
}

template <Type T>
void turn_typed(const Turning& t, int start, int stop) {
  using Value = Values<T>;
  using Stored = typename Value::Stored;
  alignas(64) float angles[TILE * MAX_DIM];
  const int half = t.half, dim = t.dim, rest = t.first + 2 * half;
  for (int s = start; s < stop; s++) turning_angles(t, s, angles + (s - start) * 2 * half);
  const int vectors = t.paired_in || t.paired_out ? 0 : half / W * W;
  for (int h = 0; h < t.heads; h++) {
    Stored* out = reinterpret_cast<Stored*>(t.out) + (int64_t(h) * t.count + start) * dim;
    for (int s = start; s < stop; s++, out += dim) {
      const Stored* x = reinterpret_cast<const Stored*>(t.x + h * t.head + s * t.row);
      const float *cos = angles + (s - start) * 2 * half, *sin = cos + half;
      // The processor does not foresee where the next head's rows lie.
      const uint8_t* later = h + 1 < t.heads ? reinterpret_cast<const uint8_t*>(x) + t.head : t.x + (s + TILE) * t.row;
      for (int64_t i = 0; i < int64_t(dim * sizeof(Stored)); i += 64) __builtin_prefetch(later + i);
      if (t.first) memcpy(out, x, t.first * sizeof(Stored));
      if (rest < dim) memcpy(out + rest, x + rest, (dim - rest) * sizeof(Stored));
      const int in = t.paired_in ? 2 : 1, to = t.paired_out ? 2 : 1;
      const Stored *a = x + t.first, *b = a + (t.paired_in ? 1 : half);
      Stored *p = out + t.first, *q = p + (t.paired_out ? 1 : half);
      int i = 0;
      for (; i < vectors; i += W) {
        V u = Value::read(a + i), v = Value::read(b + i), c = load(cos + i), n = load(sin + i);
        Value::write(p + i, (u * c - v * n) * t.ratio), Value::write(q + i, (u * n + v * c) * t.ratio);
      }
      for (; i < half; i++) {
        const float u = Value::one(a[in * i]), v = Value::one(b[in * i]);
        p[to * i] = Value::from((u * cos[i] - v * sin[i]) * t.ratio), q[to * i] = Value::from((u * sin[i] + v * cos[i]) * t.ratio);
      }
    }
  }
}

}  // namespace

void decode_as(const Decoding& d, int head, int start, int stop) {
  if (d.type == Type::FLOAT16) return decode_typed<Type::FLOAT16>(d, head, start, stop);
  if (d.type == Type::BFLOAT16) return decode_typed<Type::BFLOAT16>(d, head, start, stop);
  decode_typed<Type::FLOAT32>(d, head, start, stop);
}

void turn(const Turning& t, int start, int stop) {
  if (t.type == Type::FLOAT16) return turn_typed<Type::FLOAT16>(t, start, stop);
  if (t.type == Type::BFLOAT16) return turn_typed<Type::BFLOAT16>(t, start, stop);
  turn_typed<Type::FLOAT32>(t, start, stop);
}

}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
