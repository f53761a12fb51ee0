// Attention to keys and values coded in components, values predicted from the keys' components, at one SIMD level; compiled once for each.
//
//     k[t]   = basis^T y[t] + mean                                  y: components of the keys, of each head
//     v[t]   = size[t] R^T z[t] + mix^T y~[t] + v_mean              z: of the values; y~: those of the keys of all heads
//     out[r] = R^T sum_t w size[t] z[t] / l + mix^T sum_t w y~[t] / l + v_mean,     w = e^(s - m)
//
// Keys before RoPE are built in tiles of 32 tokens, for their rotation needs them; of keys as cached the query takes the basis.
// A component's tokens lie beside each other, so that all sums over tokens are products of rows. All heads are one call's, for they share y~.
#include "components.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {

size_t attend_components_scratch(const Problem& p);
void attend_components(const Problem& p, int chunk, float* scratch);
void add_predicted(const Problem& p, int head, const float* sums, float* out);

namespace {

// Components that are decoded before they are summed: in a core's nearest cache.
constexpr int BATCH = 16;

int64_t decoded_row(const Problem& p) { return p.span + 2 * TOGETHER; }

// Scores of one head's queries with `count` tokens, rows of `span`.
void score(const Problem& p, int head, int token, int count, float* y, float* scores) {
  alignas(64) float x[TILE * MAX_DIM];
  const Rows& keys = p.keys;
  const int *first = keys.components.first + head, from = p.k_from + token, size = first[1] - first[0], R = p.padded_rows;
  const int64_t row = decoded_row(p);
  decode_components(keys.components, first[0], first[1], from, count, y, row);
  const float* q = p.turned + int64_t(head) * R * p.dim;
  const int width = padded(count);
  const Matrix of{y + from % TOGETHER, row};
  if (p.angles) {
    for (int t = 0; t < count; t += TILE) {
      const int own = count - t < TILE ? count - t : TILE;
      rows_from_components(keys, head, {of.at + t, row}, x);
      rope(p, token + t, own, x);
      dots({q, p.dim}, R, {x, p.dim}, p.dim, padded(own), scores + t, p.span);
    }
    return;
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < width; t += W) store(scores + r * p.span + t, all(p.by_mean[head * R + r]));
  float one[4] = {1, 1, 1, 1};
  for (int r = 0; r < R; r += 4) add_sums({q + r * p.dim, p.dim}, R < 4 ? R : 4, one, of, size, width, scores + r * p.span, p.span);
}

// What of the values is their own: z += sum over tokens of w size z, `weights` of one head.
void add_own(const Problem& p, int head, int token, int count, const float* weights, const float* fade, float* scratch, float* sums) {
  const Rows& values = p.values;
  const int from = p.v_from + token, width = padded(count), *first = values.components.first + head;
  const int64_t row = decoded_row(p);
  float *scaled = scratch, *z = scaled + p.rows * p.span, *size = z + BATCH * row;
  decode_component(values.sizes, head, from, count, size);
  for (int r = 0; r < p.rows; r++)
    for (int t = 0; t < width; t += W) store(scaled + r * p.span + t, load(weights + r * p.span + t) * load(size + from % TOGETHER + t));
  for (int i = first[0]; i < first[1]; i += BATCH) {
    decode_components(values.components, i, i + BATCH < first[1] ? i + BATCH : first[1], from, count, z, row);
    add_dots({scaled, p.span}, p.rows, {z + from % TOGETHER, row}, width, BATCH, fade, sums + i - first[0], p.dim_v);
  }
}

// What they are predicted from: sums over tokens of w y~ for the queries of all heads.
void add_shared(const Problem& p, int token, int count, const float* weights, const float* fade, float* y, float* sums) {
  const Components& c = p.keys.components;
  const int every = c.first[p.keys.heads], from = p.k_from + token, width = padded(count);
  const int64_t row = decoded_row(p);
  for (int i = 0; i < every; i += BATCH) {
    decode_components(c, i, i + BATCH < every ? i + BATCH : every, from, count, y, row);
    add_dots({weights, p.span}, p.keys.heads * p.rows, {y + from % TOGETHER, row}, width, BATCH, fade, sums + i, padded(every));
  }
}

}  // namespace

size_t attend_components_scratch(const Problem& p) {
  int most = BATCH;
  for (int head = 0; head < p.keys.heads; head++) {
    const int own = p.keys.components.first[head + 1] - p.keys.components.first[head];
    most = own > most ? own : most;
  }
  // Weights of all heads and what a filled-up block of queries writes behind them; scaled weights; components; sizes; fades.
  return size_t(p.keys.heads + 1) * (p.rows + 3) * (p.span + 1) + (p.rows + 3) * p.span + (most + 1) * decoded_row(p) + 64;
}

void attend_components(const Problem& p, int chunk, float* scratch) {
  const int H = p.keys.heads, R = p.padded_rows, every = padded(p.keys.components.first[H]);
  const int begin = chunk * p.chunk, end = begin + p.chunk < p.count ? begin + p.chunk : p.count;
  float* shared = p.shared + int64_t(chunk) * H * p.rows * every;
  float *weights = scratch, *fade = weights + (H * p.rows + 3) * p.span, *rest = fade + (H * p.rows + 15) / 16 * 16;
  memset(shared, 0, sizeof(float) * H * p.rows * every);
  int lowest = p.count, highest = 0;
  for (int r = 0; r < p.rows; r++) {
    if (p.first[r] < lowest) lowest = p.first[r];
    if (p.stop[r] > highest) highest = p.stop[r];
  }
  for (int head = 0; head < H; head++) {
    memset(p.sums + (int64_t(head) * p.chunks + chunk) * R * p.dim_v, 0, sizeof(float) * R * p.dim_v);
    float* state = p.states + (int64_t(head) * p.chunks + chunk) * 3 * R;
    for (int r = 0; r < R; r++) state[r] = -INF, state[R + r] = state[2 * R + r] = 0;
  }
  for (int token = begin; token < end; token += p.span) {
    if (token + p.span <= lowest || token >= highest) continue;
    const int count = end - token < p.span ? end - token : p.span, width = padded(count);
    for (int head = 0; head < H; head++) {
      float *own = weights + head * p.rows * p.span, *fades = fade + head * p.rows;
      float* state = p.states + (int64_t(head) * p.chunks + chunk) * 3 * R;
      score(p, head, token, count, rest, own);
      for (int r = 0; r < p.rows; r++) {
        fades[r] = softmax(p, head, r, token, count, width, own + r * p.span, state[r], state[R + r]);
        state[2 * R + r] = state[R + r];  // every row has the mean
      }
      add_own(p, head, token, count, own, fades, rest, p.sums + (int64_t(head) * p.chunks + chunk) * R * p.dim_v);
    }
    add_shared(p, token, count, weights, fade, rest, shared);
  }
}

void add_predicted(const Problem& p, int head, const float* sums, float* out) {
  const float one = 1;
  const Matrix mix{p.values.mix + int64_t(head) * p.dim_v, int64_t(p.keys.heads) * p.dim_v};
  sums_of<1>(sums, 0, 1, &one, {out, 0}, mix, p.keys.components.first[p.keys.heads], p.dim_v, out, p.dim_v);
}

}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
