// Softmax attention of the queries of a KV head to a chunk of its rows, at one SIMD level; compiled once for each.
//
//     s[r, t] = scale[t] <R q[r], points[t]> + centred[t] <q[r], mean>          keys as cached
//     s[r, t] = <q[r], R_p(row[t])>                                             keys before RoPE: rows are rebuilt in their tile
//     out[r]  = R^T sum_t e^(s - m) scale[t] points[t] / l + mean sum_t e^(s - m) centred[t] / l
//
// Each tile of 32 tokens is decoded once for all queries of the head. Products take as many accumulators as a vector has lanes, RB
// queries by W / RB tokens, so that their sums are one vector.
#include "decode.hpp"
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr float INF = __builtin_inff();

inline int padded(int dim) { return (dim + 15) / 16 * 16; }

// scores[r][t] = <q[r], x[t]> for RB queries and all tokens of a tile.
template <int RB>
void dots(const float* q, const float* x, int dim, float* scores) {
  constexpr int TB = W / RB;
  for (int t = 0; t < TILE; t += TB) {
    V sum[W];
    for (int i = 0; i < W; i++) sum[i] = V{};
    for (int d = 0; d < dim; d += W) {
      V keys[TB];
      for (int j = 0; j < TB; j++) keys[j] = load(x + (t + j) * dim + d);
      for (int r = 0; r < RB; r++) {
        V query = load(q + r * dim + d);
        for (int j = 0; j < TB; j++) sum[r * TB + j] += query * keys[j];
      }
    }
    float together[W];
    store(together, sums(sum));
    for (int r = 0; r < RB; r++) memcpy(scores + r * TILE + t, together + r * TB, TB * sizeof(float));
  }
}

// sums[r] = fade[r] sums[r] + sum over t of weights[r][t] x[t], DB vectors of RB queries at a time.
template <int RB, int DB>
void add_some(const float* weights, const float* fade, const float* x, int dim, int tokens, int d, float* sums) {
  V sum[RB][DB];
  for (int r = 0; r < RB; r++)
    for (int i = 0; i < DB; i++) sum[r][i] = load(sums + r * dim + d + i * W) * fade[r];
  for (int t = 0; t < tokens; t++) {
    V value[DB];
    for (int i = 0; i < DB; i++) value[i] = load(x + t * dim + d + i * W);
    for (int r = 0; r < RB; r++) {
      V weight = all(weights[r * TILE + t]);
      for (int i = 0; i < DB; i++) sum[r][i] += weight * value[i];
    }
  }
  for (int r = 0; r < RB; r++)
    for (int i = 0; i < DB; i++) store(sums + r * dim + d + i * W, sum[r][i]);
}

template <int RB>
void add(const float* weights, const float* fade, const float* x, int dim, int tokens, float* sums) {
  constexpr int DB = W == 16 ? 16 / RB > 8 ? 8 : 16 / RB : W == 8 ? 8 / RB > 4 ? 4 : 8 / RB : 4;
  int d = 0;
  for (; d + DB * W <= dim; d += DB * W) add_some<RB, DB>(weights, fade, x, dim, tokens, d, sums);
  for (; d < dim; d += W) add_some<RB, 1>(weights, fade, x, dim, tokens, d, sums);
}

// Rotate the pairs (a, b) of each row, `half` apart, by the angles of its position.
void rope(const Problem& p, int token, int count, float* x) {
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

// Points of keys before RoPE to rows as cached.
void turn(const Problem& p, int head, int token, int count, float* x) {
  const Rows& keys = p.keys;
  if (keys.signs && keys.odd == 1 && 2 * p.half == keys.dim) {
    const float* angles = p.angles + int64_t(token) * keys.dim;
    if (keys.dim == 4 * W) return to_whole_keys<4>(keys, head, p.k_from + token, count, angles, x);
    if (keys.dim == 8 * W) return to_whole_keys<8>(keys, head, p.k_from + token, count, angles, x);
  }
  to_rows(keys, head, p.k_from + token, count, x);
  rope(p, token, count, x);
}

void prepare(const Problem& p, int head) {
  const Rows& keys = p.keys;
  for (int r = 0; r < p.padded_rows; r++) {
    float* to = p.turned + (int64_t(head) * p.padded_rows + r) * p.dim;
    for (int i = 0; i < p.dim; i++) to[i] = 0;
    float by_mean = 0;
    if (r < p.rows) {
      const float* q = p.q + (int64_t(head) * p.rows + r) * keys.dim;
      memcpy(to, q, keys.dim * sizeof(float));
      if (!p.angles && keys.mean)
        for (int i = 0; i < keys.dim; i++) by_mean += q[i] * keys.mean[int64_t(head) * keys.dim + i];
      if (!p.angles && keys.signs) {
        const float norm = 1 / __builtin_sqrtf(float(keys.dim));
        for (int i = 0; i < keys.dim; i++) to[i] *= keys.signs[i];
        transform(keys, to);
        for (int i = 0; i < keys.dim; i++) to[i] *= norm;
      }
    }
    p.by_mean[head * p.padded_rows + r] = by_mean;
  }
}

// Scores of one row of a tile to weights, in place; hidden tokens get none. Returns the factor of what was summed before.
float softmax(const Problem& p, int row, int token, int count, float* scores, float& most, float& total) {
  const int first = row < p.rows ? p.first[row] - token : 0, stop = row < p.rows ? p.stop[row] - token : 0;
  if (first > 0 || stop < TILE || count < TILE)
    for (int t = 0; t < TILE; t++)
      if (t < first || t >= stop || t >= count) scores[t] = -INF;
  V top = load(scores);
  for (int t = W; t < TILE; t += W) {
    V s = load(scores + t);
    top = s > top ? s : top;
  }
  float largest = most;
  for (int i = 0; i < W; i++) largest = top[i] > largest ? top[i] : largest;
  const float base = largest == -INF ? 0 : largest;
  V sum{};
  for (int t = 0; t < TILE; t += W) {
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

void attend(const Problem& p, int head, int chunk, float* weights) {
  alignas(64) float x[TILE * MAX_DIM];
  const int R = p.padded_rows, stop = (chunk + 1) * p.chunk < p.count ? (chunk + 1) * p.chunk : p.count;
  const float* q = p.turned + int64_t(head) * R * p.dim;
  const float* by_mean = p.by_mean + int64_t(head) * R;
  float* sums = p.sums + (int64_t(head) * p.chunks + chunk) * R * p.dim_v;
  float* most = p.states + (int64_t(head) * p.chunks + chunk) * 3 * R;
  float *total = most + R, *with_mean = most + 2 * R;
  memset(sums, 0, sizeof(float) * R * p.dim_v);
  int lowest = p.count, highest = 0;
  for (int r = 0; r < R; r++) {
    most[r] = -INF, total[r] = with_mean[r] = 0;
    if (r < p.rows && p.first[r] < lowest) lowest = p.first[r];
    if (r < p.rows && p.stop[r] > highest) highest = p.stop[r];
  }
  const Rows &keys = p.keys, &values = p.values;
  const int RB = R < 4 ? R : 4;
  for (int token = chunk * p.chunk; token < stop; token += TILE) {
    if (token + TILE <= lowest || token >= highest) continue;
    const int count = stop - token < TILE ? stop - token : TILE;
    points(keys, head, p.k_from + token, count, x);
    for (int i = count * p.dim; i < TILE * p.dim; i++) x[i] = 0;
    if (p.angles) turn(p, head, token, count, x);
    for (int r = 0; r < R; r += RB) {
      if (RB == 4) dots<4>(q + r * p.dim, x, p.dim, weights + r * TILE);
      if (RB == 2) dots<2>(q + r * p.dim, x, p.dim, weights + r * TILE);
      if (RB == 1) dots<1>(q + r * p.dim, x, p.dim, weights + r * TILE);
    }
    if (keys.scale && !p.angles) {
      const uint16_t* stored = keys.scale + int64_t(head) * keys.count + p.k_from + token;
      float scale[TILE] = {}, centred[TILE] = {};
      for (int t = 0; t < count; t++) scale[t] = bfloat(stored[t] & 0x7fff), centred[t] = stored[t] < 0x8000;
      for (int r = 0; r < R; r++)
        for (int t = 0; t < TILE; t += W) {
          float* s = weights + r * TILE + t;
          store(s, load(s) * load(scale + t) + load(centred + t) * by_mean[r]);
        }
    }
    points(values, head, p.v_from + token, count, x);
    float fade[4], scale[TILE] = {}, centred[TILE] = {};
    if (values.scale) {
      const uint16_t* stored = values.scale + int64_t(head) * values.count + p.v_from + token;
      for (int t = 0; t < count; t++) scale[t] = bfloat(stored[t] & 0x7fff), centred[t] = stored[t] < 0x8000;
    }
    for (int r = 0; r < R; r += RB) {
      for (int i = 0; i < RB; i++) {
        float* w = weights + (r + i) * TILE;
        fade[i] = softmax(p, r + i, token, count, w, most[r + i], total[r + i]);
        if (!values.scale) continue;
        V with{};
        for (int t = 0; t < TILE; t += W) {
          V weight = load(w + t);
          with += weight * load(centred + t);
          store(w + t, weight * load(scale + t));
        }
        float added = 0;
        for (int j = 0; j < W; j++) added += with[j];
        with_mean[r + i] = with_mean[r + i] * fade[i] + added;
      }
      float* to = sums + r * p.dim_v;
      if (RB == 4) add<4>(weights + r * TILE, fade, x, p.dim_v, count, to);
      if (RB == 2) add<2>(weights + r * TILE, fade, x, p.dim_v, count, to);
      if (RB == 1) add<1>(weights + r * TILE, fade, x, p.dim_v, count, to);
    }
  }
}

void finish(const Problem& p, int head) {
  const Rows& values = p.values;
  const int R = p.padded_rows, dim = values.dim;
  const float norm = values.signs ? 1 / __builtin_sqrtf(float(dim)) : 1;
  alignas(64) float out[MAX_DIM + W];
  for (int r = 0; r < p.rows; r++) {
    const float* states = p.states + int64_t(head) * p.chunks * 3 * R + r;
    float largest = -INF, total = 0, with_mean = 0;
    for (int c = 0; c < p.chunks; c++)
      if (states[int64_t(c) * 3 * R] > largest) largest = states[int64_t(c) * 3 * R];
    const float base = largest == -INF ? 0 : largest;
    for (int i = 0; i < p.dim_v; i++) out[i] = 0;
    for (int c = 0; c < p.chunks; c++) {
      const float* state = states + int64_t(c) * 3 * R;
      const float weight = exp_negative(all(state[0] - base))[0];
      total += weight * state[R], with_mean += weight * state[2 * R];
      const float* sums = p.sums + ((int64_t(head) * p.chunks + c) * R + r) * p.dim_v;
      for (int i = 0; i < p.dim_v; i += W) store(out + i, load(out + i) + load(sums + i) * weight);
    }
    const float over = total == 0 ? 1 : 1 / total;
    if (values.signs) transform(values, out);
    float* to = p.out + (int64_t(head) * p.rows + r) * dim;
    for (int i = 0; i < dim; i++) {
      float x = out[i] * over * norm;
      if (values.signs) x *= values.signs[i];
      if (values.mean) x += with_mean * over * values.mean[int64_t(head) * dim + i];
      to[i] = x;
    }
    p.lse[int64_t(head) * p.rows + r] = total == 0 ? -INF : largest + __builtin_logf(total);
  }
}

void decode(const Rows& rows, int head, int from, int count, float* out) {
  alignas(64) float x[TILE * MAX_DIM];
  const int width = padded(rows.dim);
  for (int t = 0; t < count; t += TILE) {
    const int n = count - t < TILE ? count - t : TILE;
    points(rows, head, from + t, n, x);
    to_rows(rows, head, from + t, n, x);
    for (int i = 0; i < n; i++) memcpy(out + int64_t(t + i) * rows.dim, x + i * width, rows.dim * sizeof(float));
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE

#define KVTOOL_STRING(x) #x
#define KVTOOL_NAME(x) KVTOOL_STRING(x)
#define KVTOOL_ENCODER_(x) x##_encoder
#define KVTOOL_ENCODER(x) KVTOOL_ENCODER_(x)
extern const Encoder KVTOOL_ENCODER(KVTOOL_LEVEL);
const Level KVTOOL_LEVEL = {
    KVTOOL_NAME(KVTOOL_LEVEL), &KVTOOL_ENCODER(KVTOOL_LEVEL), KVTOOL_INSIDE::prepare, KVTOOL_INSIDE::attend, KVTOOL_INSIDE::finish, KVTOOL_INSIDE::decode};

}  // namespace kvtool
