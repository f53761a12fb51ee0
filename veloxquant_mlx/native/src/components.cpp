// Attention to keys and values coded in components, values predicted from the keys' components, at one SIMD level; compiled once for each.
//
//     k[t]   = basis^T y[t] + mean                                  y: components of the keys, of each head
//     v[t]   = size[t] R^T z[t] + mix^T y~[t] + v_mean              z: of the values; y~: those of the keys of all heads
//     out[r] = R^T sum_t w size[t] z[t] / l + mix^T sum_t w y~[t] / l + v_mean,     w = e^(s - m)
//
// Keys before RoPE are built, for their rotation needs them, a few columns at a time (grouped.hpp); of keys as cached the query takes the
// basis.
// A component's tokens lie beside each other: sums over tokens are products of rows, or have the queries of all heads in the lanes. All
// heads are one call's, for they share y~.
#include "components.hpp"
#include "grouped.hpp"
#include "own_values.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "shared.hpp"
#include "simd.hpp"
#include "strips.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {

size_t attend_components_scratch(const Problem& p);
void attend_components(const Problem& p, int chunk, float* scratch);
void add_predicted(const Problem& p, int head, const float* sums, float* out);

namespace {

// Components that are decoded before they are summed, and tokens of them: in a core's nearest cache.
constexpr int BATCH = W == 16 ? 16 : 8, PART = W == 16 ? 512 : 256;
constexpr int SCALED_ROW = W == 16 ? PART : PART + 2 * TOGETHER;
int64_t decoded_row(const Problem& p) { return (p.span < PART ? p.span : PART) + 2 * TOGETHER; }

// f(start, count) for parts of a span.
template <class F>
void by_parts(int count, int part, F f) {
  for (int t = 0; t < count; t += part) f(t, count - t < part ? count - t : part);
}

void scale_rows(const float* scale, int rows, int size, float* x, int64_t row) {
  for (int r = 0; r < rows; r++) {
    if (scale[r] == 1) continue;  // most are: a maximum seldom changes
    for (int i = 0; i < size; i += W) store(x + r * row + i, load(x + r * row + i) * scale[r]);
  }
}

// Scores of one head's queries with `count` tokens, at most PART, rows of `span`.
void score(const Problem& p, int head, int token, int count, float* y, float* scores) {
  const Rows& keys = p.keys;
  const int *first = keys.components.first + head, from = p.k_from + token, size = first[1] - first[0], R = p.padded_rows;
  decode_components(keys.components, first[0], first[1], from, count, y, decoded_row(p));
  const float* q = p.turned + int64_t(head) * R * p.dim;
  const int width = padded(count);
  for (int r = 0; r < R; r++)
    for (int t = 0; t < width; t += W) store(scores + r * p.span + t, all(p.by_mean[head * R + r]));
  float one[4] = {1, 1, 1, 1};
  const Matrix of{y + from % TOGETHER, decoded_row(p)};
  for (int r = 0; r < R; r += 4) add_sums({q + r * p.dim, p.dim}, R < 4 ? R : 4, one, of, size, width, scores + r * p.span, p.span);
}

// What of the values is their own: z += sum over tokens of w size z, `weights` of one head.
void add_own(const Problem& p, int head, int token, int count, const float* weights, float* scratch, float* sums) {
  const Rows& values = p.values;
  const Components& c = values.components;
  const int from = p.v_from + token, width = padded(count), *first = c.first + head;
#if defined(__AVX2__) && !defined(__AVX512F__)
  const int lead = from % TOGETHER, blocks = (lead + count + TOGETHER - 1) / TOGETHER;  // whole blocks: beside the tokens are zeros
#else
  const int lead = 0;
#endif
  float *scaled = scratch, *z = scaled + p.rows * SCALED_ROW, *size = z + BATCH * decoded_row(p);
  decode_component(values.sizes, head, from, count, size);
  for (int r = 0; r < p.rows; r++) {
    float* to = scaled + r * SCALED_ROW;
    memset(to, 0, lead * sizeof(float)), to += lead;
    for (int t = 0; t < width; t += W) store(to + t, load(weights + r * p.span + t) * load(size + from % TOGETHER + t));
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (lead + width < blocks * TOGETHER) memset(to + width, 0, (blocks * TOGETHER - lead - width) * sizeof(float));
#endif
  }
  for (int i = first[0], stop; i < first[1]; i = stop) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    for (stop = i + 1; stop < first[1] && c.bits[stop] == c.bits[i];) stop++;
    int taken = 0;
    with_bits(c.bits[i], [&](auto bits) {
      constexpr int BITS = decltype(bits)::value;
      if constexpr (BITS <= WORD_BITS)
        taken = add_coded_dots<BITS>(c, i, stop, from / TOGETHER, blocks, {scaled, SCALED_ROW}, p.rows, sums + i - first[0], p.dim_v);
    });
    if (taken) {
      stop = i + taken;
      continue;
    }
#endif
    stop = i + BATCH < first[1] ? i + BATCH : first[1];
    decode_components(c, i, stop, from, count, z, decoded_row(p));
    add_dots({scaled + lead, SCALED_ROW}, p.rows, {z + from % TOGETHER, decoded_row(p)}, width, BATCH, sums + i - first[0], p.dim_v);
  }
}

// Cosines, then sines, of the first `fast` pairs, with the tokens beside each other.
void turn_fast(const Problem& p, int token, int count, int fast, float* out, int64_t row) {
  constexpr int SOME = 32;
  const int bytes = 8 * p.half;
  const auto* from = reinterpret_cast<const uint8_t*>(p.angles + int64_t(token) * 2 * p.half);
  const auto* end = reinterpret_cast<const uint8_t*>(p.angles + int64_t(p.count) * 2 * p.half);
  auto* to = reinterpret_cast<uint32_t*>(out);
  for (int t = 0; t < count; t += SOME, from += SOME * bytes, to += SOME) {
    const int some = count - t < SOME ? count - t : SOME;
    // What is read next: turning waits for memory, and no machine foresees parts of rows.
    for (int i = SOME; i < 2 * SOME; i++)
      for (int at = 0; at < 4 * fast; at += 64) __builtin_prefetch(from + i * bytes + at), __builtin_prefetch(from + i * bytes + 4 * p.half + at);
    turn_rows(from, end, bytes, 4 * fast, some, to, row);
    turn_rows(from + 4 * p.half, end, bytes, 4 * fast, some, to + fast * row, row);
  }
}

// Floats that the planes of keys' points need.
size_t planes_scratch(const Components& c, int count) {
  size_t most = 0;
  for (int i = 0; i < count; i++) {
    const size_t end = c.table[i] + (1 << c.bits[i]);
    if (planes_of(c.bits[i]) && end > most) most = end;
  }
  return (most + 15) / 16 * 16;
}

}  // namespace

size_t attend_components_scratch(const Problem& p) {
  int most = BATCH;
  for (int head = 0; head < p.keys.heads; head++) {
    const int own = p.keys.components.first[head + 1] - p.keys.components.first[head];
    most = own > most ? own : most;
  }
  // Weights of all heads and what a filled-up block of queries writes behind them, fades, turned angles, sums and what a filled-up block of
  // components writes behind them, weights of nodes; scaled weights, components, sizes.
  const size_t weights = (p.keys.heads * p.rows + 3) * p.span, angles = 2 * p.half * (p.span + TILE), lanes = padded(p.keys.heads * p.rows);
  const size_t shared = (padded(p.keys.components.first[p.keys.heads]) + AT_A_TIME) * lanes, together = shared_scratch(lanes);
  const size_t parts = (p.rows + 3) * SCALED_ROW + (most + 1) * decoded_row(p), columns = p.angles ? columns_scratch(p, most) : 0;
  size_t rest = parts > columns ? parts : columns;
  const size_t planes = planes_scratch(p.keys.components, p.keys.components.first[p.keys.heads]);
  return planes + weights + lanes + angles + shared + Slow::ROWS * (p.span + TILE) + (rest > together ? rest : together);
}

void attend_components(const Problem& given, int chunk, float* scratch) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  Problem p = given;
  if (p.count >= MANY) {
    const int every = p.keys.components.first[p.keys.heads];
    p.keys.components.planes = reinterpret_cast<uint8_t*>(scratch);
    make_planes(p.keys.components, every, reinterpret_cast<uint8_t*>(scratch)), scratch += planes_scratch(p.keys.components, every);
  }
#else
  const Problem& p = given;
#endif
  const int H = p.keys.heads, R = p.padded_rows, every = padded(p.keys.components.first[H]);
  const int begin = chunk * p.chunk, end = begin + p.chunk < p.count ? begin + p.chunk : p.count;
  const int64_t angle_row = p.span + TILE, lanes = padded(H * p.rows);
  float *weights = scratch, *fade = weights + (H * p.rows + 3) * p.span, *turns = fade + lanes, *shared = turns + 2 * p.half * angle_row;
  float *nodes = shared + (every + AT_A_TIME) * lanes, *rest = nodes + Slow::ROWS * angle_row;
  Slow slow{};
  memset(shared, 0, sizeof(float) * every * lanes), memset(fade, 0, sizeof(float) * lanes);
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
    if (p.angles) {
      slow = slow_pairs(p, token, count, nodes, angle_row);
      turn_fast(p, token, count, slow.first, turns, angle_row);
    }
    for (int head = 0; head < H; head++) {
      float *own = weights + head * p.rows * p.span, *fades = fade + head * p.rows;
      float* state = p.states + (int64_t(head) * p.chunks + chunk) * 3 * R;
      float* sums = p.sums + (int64_t(head) * p.chunks + chunk) * R * p.dim_v;
      if (p.angles) {
        // What comes next: this head's values, and keys of the next head or span.
        const bool last = head + 1 == H;
        const int at = last ? token + p.span : token, *k = p.keys.components.first + (last ? 0 : head + 1), *v = p.values.components.first + head;
        CodesAhead keys(p.keys.components, k[0], k[1], p.k_from + at, end - at < p.span ? end - at : p.span);
        CodesAhead values(p.values.components, v[0], v[1], p.v_from + token, count);
        score_columns(p, head, token, count, turns, angle_row, slow, keys, values, rest, own);
      } else
        by_parts(count, PART, [&](int t, int n) { score(p, head, token + t, n, rest, own + t); });
      for (int r = 0; r < p.rows; r++) {
        fades[r] = softmax(p, head, r, token, count, width, own + r * p.span, state[r], state[R + r]);
        state[2 * R + r] = state[R + r];  // every row has the mean
      }
      scale_rows(fades, p.rows, p.dim_v, sums, p.dim_v);
      by_parts(count, PART, [&](int t, int n) { add_own(p, head, token + t, n, own + t, rest, sums); });
    }
    for (int i = 0; i < every; i++)
      for (int q = 0; q < lanes; q += W) store(shared + int64_t(i) * lanes + q, load(shared + int64_t(i) * lanes + q) * load(fade + q));
    by_parts(count, FEW, [&](int t, int n) { add_shared(p, token + t, n, weights + t, fade, rest, shared); });
  }
  // To rows of the queries.
  auto* sums = reinterpret_cast<uint32_t*>(p.shared + int64_t(chunk) * H * p.rows * every);
  turn_rows(reinterpret_cast<uint8_t*>(shared), reinterpret_cast<uint8_t*>(rest), 4 * lanes, 4 * H * p.rows, every, sums, every);
}

void add_predicted(const Problem& p, int head, const float* sums, float* out) {
  const float one = 1;
  const Matrix mix{p.values.mix + int64_t(head) * p.dim_v, int64_t(p.keys.heads) * p.dim_v};
  sums_of<1>(sums, 0, 1, &one, {out, 0}, mix, p.keys.components.first[p.keys.heads], p.dim_v, out, p.dim_v);
}

}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
