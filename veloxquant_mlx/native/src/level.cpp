// Softmax attention of the queries of a KV head to a chunk of its rows, at one SIMD level; compiled once for each.
//
//     s[r, t] = scale[t] <R q[r], points[t]> + centred[t] <q[r], mean>          keys as cached
//     s[r, t] = <q[r], R_p(row[t])>                                             keys before RoPE: rows are rebuilt in their tile
//     out[r]  = R^T sum_t e^(s - m) scale[t] points[t] / l + mean sum_t e^(s - m) centred[t] / l
//
// Each tile of 32 tokens is decoded once for all queries of the head.
#include "decode.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {

// In components.cpp.
size_t attend_components_scratch(const Problem& p);
void attend_components(const Problem& p, int chunk, float* scratch);
void add_predicted(const Problem& p, int head);

// In convert.cpp.
void decode_as(const Decoding&, int head, int start, int stop);
void turn(const Turning&, int start, int stop);

namespace {

// Points of keys before RoPE to rows as cached.
void to_cached(const Problem& p, int head, int token, int count, float* x) {
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
      if (p.values.mix && !p.angles) {
        p.by_mean[head * p.padded_rows + r] = to_components(keys, head, q, to);
        continue;
      }
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
    if (p.angles) to_cached(p, head, token, count, x);
    dots({q, p.dim}, R, {x, p.dim}, p.dim, TILE, weights, TILE);
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
        fade[i] = softmax(p, r + i, token, count, TILE, w, most[r + i], total[r + i]);
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
      add_sums({weights + r * TILE, TILE}, RB, fade, {x, p.dim_v}, count, p.dim_v, sums + r * p.dim_v, p.dim_v);
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
    KVTOOL_NAME(KVTOOL_LEVEL), &KVTOOL_ENCODER(KVTOOL_LEVEL), KVTOOL_INSIDE::prepare, KVTOOL_INSIDE::attend, KVTOOL_INSIDE::finish,
    KVTOOL_INSIDE::decode, KVTOOL_INSIDE::attend_components_scratch, KVTOOL_INSIDE::attend_components, KVTOOL_INSIDE::add_predicted,
    KVTOOL_INSIDE::decode_as, KVTOOL_INSIDE::turn};

}  // namespace kvtool
