// Products of small matrices, and the softmax between them.
#pragma once
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr float INF = __builtin_inff();

// Rows of floats at a distance.
struct Matrix {
  const float* at;
  int64_t row;
};

// out[r][t] = <a[r], b[t]> for RB rows of a and `count` of b, a multiple of W / RB, or added to what is there.
template <int RB, bool ADD>
void some_dots(Matrix a, Matrix b, int size, int count, float* out, int64_t row) {
  // As many accumulators as a vector has lanes, so that their sums are one vector.
  constexpr int TB = W / RB;
  for (int t = 0; t < count; t += TB) {
    V sum[W];
    for (int i = 0; i < W; i++) sum[i] = V{};
    for (int d = 0; d < size; d += W) {
      V y[TB];
      for (int j = 0; j < TB; j++) y[j] = load(b.at + (t + j) * b.row + d);
      for (int r = 0; r < RB; r++) {
        V x = load(a.at + r * a.row + d);
        for (int j = 0; j < TB; j++) sum[r * TB + j] += x * y[j];
      }
    }
    float together[W];
    store(together, sums(sum));
    for (int r = 0; r < RB; r++) {
      float* to = out + r * row + t;
      if constexpr (ADD)
        for (int j = 0; j < TB; j++) to[j] += together[r * TB + j];
      else
        memcpy(to, together + r * TB, TB * sizeof(float));
    }
  }
}

template <bool ADD>
void dots_of(Matrix a, int rows, Matrix b, int size, int count, float* out, int64_t row) {
  for (int r = 0; r < rows;) {
    const int left = rows - r, step = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const Matrix own{a.at + r * a.row, a.row};
    if (step == 4) some_dots<4, ADD>(own, b, size, count, out + r * row, row);
    if (step == 2) some_dots<2, ADD>(own, b, size, count, out + r * row, row);
    if (step == 1) some_dots<1, ADD>(own, b, size, count, out + r * row, row);
    r += step;
  }
}

// Of all rows of a. `count` rows of b are a multiple of 16, `size` is one of W.
inline void dots(Matrix a, int rows, Matrix b, int size, int count, float* out, int64_t row) {
  dots_of<false>(a, rows, b, size, count, out, row);
}
inline void add_dots(Matrix a, int rows, Matrix b, int size, int count, float* out, int64_t row) {
  dots_of<true>(a, rows, b, size, count, out, row);
}

// out[r] = fade[r] from[r] + sum over t of weights[r, t] x[t]: DB vectors of RB rows, from entry d on.
template <int RB, int DB>
void some_sums(
    const float* weights, int64_t wr, int64_t wt, const float* fade, Matrix from, Matrix x, int count, int d, float* out, int64_t row) {
  V sum[RB][DB];
  for (int r = 0; r < RB; r++)
    for (int i = 0; i < DB; i++) sum[r][i] = V{};
  for (int t = 0; t < count; t++) {
    V y[DB];
    for (int i = 0; i < DB; i++) y[i] = load(x.at + t * x.row + d + i * W);
    for (int r = 0; r < RB; r++) {
      V weight = all(weights[r * wr + t * wt]);
      for (int i = 0; i < DB; i++) sum[r][i] += weight * y[i];
    }
  }
  for (int r = 0; r < RB; r++)
    for (int i = 0; i < DB; i++) store(out + r * row + d + i * W, load(from.at + r * from.row + d + i * W) * fade[r] + sum[r][i]);
}

// Vectors that a step of `some_sums` takes: as many accumulators as leave registers for the rest.
template <int RB>
constexpr int at_once() {
  constexpr int most = W == 16 ? 16 / RB : W == 8 ? 8 / RB : 4;
  return W == 4 ? 4 : most > W / 2 ? W / 2 : most;
}

// All `size` entries (a multiple of 16) of RB rows.
template <int RB>
void sums_of(
    const float* weights, int64_t wr, int64_t wt, const float* fade, Matrix from, Matrix x, int count, int size, float* out, int64_t row) {
  constexpr int DB = at_once<RB>();
  int d = 0;
  for (; d + DB * W <= size; d += DB * W) some_sums<RB, DB>(weights, wr, wt, fade, from, x, count, d, out, row);
  for (; d + 2 * W <= size; d += 2 * W) some_sums<RB, 2>(weights, wr, wt, fade, from, x, count, d, out, row);
  for (; d < size; d += W) some_sums<RB, 1>(weights, wr, wt, fade, from, x, count, d, out, row);
}

// Of R queries, in place; R is 1, 2 or a multiple of 4.
inline void add_sums(Matrix weights, int rows, const float* fade, Matrix x, int count, int size, float* out, int64_t row) {
  const int RB = rows < 4 ? rows : 4;
  for (int r = 0; r < rows; r += RB, weights.at += RB * weights.row, fade += RB, out += RB * row) {
    if (RB == 4) sums_of<4>(weights.at, weights.row, 1, fade, {out, row}, x, count, size, out, row);
    if (RB == 2) sums_of<2>(weights.at, weights.row, 1, fade, {out, row}, x, count, size, out, row);
    if (RB == 1) sums_of<1>(weights.at, weights.row, 1, fade, {out, row}, x, count, size, out, row);
  }
}

// Scores of `count` tokens as a mask has them seen.
inline void apply_mask(Seen seen, const uint8_t* mask, int count, float* scores) {
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  const auto* floats = reinterpret_cast<const float*>(mask);
  const auto* words = reinterpret_cast<const uint16_t*>(mask);
  const int whole = count / W * W;
  for (int t = 0; t < whole; t += W) {
    const V s = load(scores + t);
    if (seen == Seen::BOOL) {
      Bytes bytes;
      memcpy(&bytes, mask + t, W);
      store(scores + t, __builtin_convertvector(bytes, VI) != 0 ? s : all(-INF));
    } else {
      const V added = seen == Seen::FLOAT32 ? load(floats + t) : seen == Seen::FLOAT16 ? load_half(words + t) : load_bfloat(words + t);
      store(scores + t, s + added);
    }
  }
  for (int t = whole; t < count; t++) {
    if (seen == Seen::BOOL)
      scores[t] = mask[t] ? scores[t] : -INF;
    else
      scores[t] += seen == Seen::FLOAT32 ? floats[t] : seen == Seen::FLOAT16 ? half(words[t]) : bfloat(words[t]);
  }
}

// Scores of `width` tokens (a multiple of 16), of which `count` are there, to weights, in place; hidden tokens get none. Returns the factor
// of what was summed before.
inline float softmax(
    const Problem& p, int head, int row, int token, int count, int width, float* scores, float& most, float& total) {
  if (p.mask && row < p.rows) {
    constexpr int BYTES[] = {1, 4, 2, 2};
    apply_mask(p.seen, p.mask[int64_t(head) * p.rows + row] + int64_t(token) * BYTES[int(p.seen)], count, scores);
  }
  const int first = row < p.rows ? p.first[row] - token : 0, stop = row < p.rows ? p.stop[row] - token : 0;
  if (first > 0 || stop < width || count < width)
    for (int t = 0; t < width; t++)
      if (t < first || t >= stop || t >= count) scores[t] = -INF;
  V top = load(scores);
  for (int t = W; t < width; t += W) {
    V s = load(scores + t);
    top = s > top ? s : top;
  }
  float largest = most;
  for (int i = 0; i < W; i++) largest = top[i] > largest ? top[i] : largest;
  const float base = largest == -INF ? 0 : largest;
  V sum{};
  for (int t = 0; t < width; t += W) {
    V weight = exp_negative(load(scores + t) - base);
    store(scores + t, weight);
    sum += weight;
  }
  const float fade = exp_negative(all(most - base))[0];
  float added = 0;
  for (int i = 0; i < W; i++) added += sum[i];
  total = total * fade + added;
  most = largest;
  return fade;
}

// Rotate the pairs (a, b) of each row, `half` apart, by the angles of its position.
inline void rope(const Problem& p, int token, int count, float* x) {
  const int dim = p.dim, half = p.half;
  for (int t = 0; t < count; t++) {
    float *a = x + t * dim + p.rope_first, *b = a + half;
    const float *cos = p.angles + int64_t(token + t) * 2 * half, *sin = cos + half;
    int i = 0;
    for (; i + W <= half; i += W) {
      V u = load(a + i), v = load(b + i), c = load(cos + i), s = load(sin + i);
      store(a + i, u * c - v * s);
      store(b + i, u * s + v * c);
    }
    for (; i < half; i++) {
      float u = a[i], v = b[i];
      a[i] = u * cos[i] - v * sin[i], b[i] = u * sin[i] + v * cos[i];
    }
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
