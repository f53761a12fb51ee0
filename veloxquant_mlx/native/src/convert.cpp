// Codes to rows of a cache, and rows of a cache from one rotary embedding to another, at one SIMD level; compiled once for each.
//
//     out[s] = narrow(R_p (scale[s] R^T points[s] + centred[s] mean))          decode_as
//     out[s] = narrow(ratio e^(i (redo - undo)[s]) x[s])                       turn, a pair of entries as a complex number
//
// A tile of 32 tokens at a time, so that nothing but codes is read and nothing but the result is written.
#include "decode.hpp"
#include "narrow.hpp"
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// --- decoding

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
    const uint16_t stored = static_cast<const uint16_t*>(rows.scale.at)[head * int64_t(rows.count) + from + t];
    const float factor = bfloat(stored & 0x7fff) * norm;
    V v[VECTORS];
    butterflies<VECTORS>(out, v);
    for (int i = 0; i < VECTORS; i++) v[i] *= load(rows.signs + W * i) * factor;
    if (mean && stored < 0x8000)
      for (int i = 0; i < VECTORS; i++) v[i] += load(mean + W * i);
    for (int i = 0; i < VECTORS; i++) store(out + W * i, v[i]);
  }
}

#if defined(KVTOOL_DECODES_AT_ONCE)
// The same of a row that fits half at a time.
template <int VECTORS>
void to_two_halves(const Rows& rows, int head, int from, int count, float* out) {
  constexpr int dim = 2 * VECTORS * W;
  const float norm = 1 / __builtin_sqrtf(float(dim));
  const float* mean = rows.mean ? rows.mean + int64_t(head) * dim : nullptr;
  for (int t = 0; t < count; t++, out += dim) {
    const uint16_t stored = static_cast<const uint16_t*>(rows.scale.at)[head * int64_t(rows.count) + from + t];
    const float factor = bfloat(stored & 0x7fff) * norm;
    V v[VECTORS];
    butterflies<VECTORS>(out, v);
    for (int i = 0; i < VECTORS; i++) store(out + W * i, v[i]);
    butterflies<VECTORS>(out + dim / 2, v);
    const auto ends = [&](auto centred) {
      for (int i = 0; i < VECTORS; i++) {
        const V a = load(out + W * i), b = v[i];
        for (int j = i; j < 2 * VECTORS; j += VECTORS) {
          V x = (j == i ? a + b : a - b) * (load(rows.signs + W * j) * factor);
          if constexpr (decltype(centred)::value) x += load(mean + W * j);
          store(out + W * j, x);
        }
      }
    };
    mean && stored < 0x8000 ? ends(Number<1>()) : ends(Number<0>());
  }
}
#endif

void rebuild(const Rows& rows, int head, int from, int count, float* x) {
  points(rows, head, from, count, x);
  if (rows.scale && rows.signs && rows.odd == 1) {
    if (rows.dim == 4 * W) return to_whole_rows<4>(rows, head, from, count, x);
    if (rows.dim == 8 * W) return to_whole_rows<8>(rows, head, from, count, x);
#if defined(KVTOOL_DECODES_AT_ONCE)
    if (rows.dim == 16 * W) return to_two_halves<8>(rows, head, from, count, x);
#endif
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
    Stored* out = reinterpret_cast<Stored*>(d.out) + (int64_t(head) * d.count + t) * dim;
#if defined(KVTOOL_DECODES_AT_ONCE)
    // Rows of codes that stay as they are become so where they go.
    if constexpr (T == Type::FLOAT32)
      if (d.rows.type == Type::CODES && !d.angles.pages && width == dim) {
        rebuild(d.rows, head, d.from + t, count, out);
        continue;
      }
#endif
    rebuild(d.rows, head, d.from + t, count, x);
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
      // The processor does not foresee where the next head's rows lie, nor where they go: a line is read before a part of it is written.
      const bool last = h + 1 == t.heads;
      const uint8_t* later = last ? t.x + (s + TILE) * t.row : reinterpret_cast<const uint8_t*>(x) + t.head;
      const Stored* there = last ? reinterpret_cast<const Stored*>(t.out) + int64_t(s + TILE) * dim : out + int64_t(t.count) * dim;
      for (int64_t i = 0; i < int64_t(dim * sizeof(Stored)); i += 64)
        __builtin_prefetch(later + i), __builtin_prefetch(reinterpret_cast<const uint8_t*>(there) + i, 1);
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
