// Softmax attention of the queries of a KV head to a chunk of its rows, at one SIMD level; compiled once for each.
//
//     s[r, t] = scale[t] <R q[r], points[t]> + centred[t] <q[r], mean>          keys as cached
//     s[r, t] = <q[r], R_p(row[t])>                                             keys before RoPE: rows are rebuilt in their tile
//     out[r]  = R^T sum_t e^(s - m) scale[t] points[t] / l + mean sum_t e^(s - m) centred[t] / l
//
// Spans of tokens are decoded once for all queries of the head.
#include "before_rope.hpp"
#include "columns.hpp"
#include "decode.hpp"
#include "planes.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {

// In components.cpp.
size_t attend_components_scratch(const Problem& p);
void attend_components(const Problem& p, int chunk, float* scratch);
void add_predicted(const Problem& p, int head, const float* sums, float* out);  // out += mix^T sums

// In convert.cpp.
void decode_as(const Decoding&, int head, int start, int stop);
void turn(const Turning&, int start, int stop);

namespace {

// Points of keys before RoPE to rows as cached.
void to_cached(const Problem& p, int head, int token, int count, float* x) {
  const Rows& keys = p.keys;
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
      if (p.angles && p.paired)
        for (int i = 0; i < p.half; i++)
          to[p.rope_first + i] = q[p.rope_first + 2 * i], to[p.rope_first + p.half + i] = q[p.rope_first + 2 * i + 1];
      if (keys.signs && in_registers(p)) fold_query(keys, to);
      if (!p.angles && keys.mean)
        for (int i = 0; i < keys.dim; i++) by_mean += q[i] * keys.mean[int64_t(head) * keys.dim + i];
      if (!p.angles && keys.signs) {
        const float norm = 1 / __builtin_sqrtf(float(keys.dim));
        const float* signs = keys.signs + head * keys.signs_head;
        for (int i = 0; i < keys.dim; i++) to[i] *= signs[i];
        transform(keys, to);
        for (int i = 0; i < keys.dim; i++) to[i] *= norm;
      }
    }
    p.by_mean[head * p.padded_rows + r] = by_mean;
  }
}

// Whether tokens can be in the lanes: codes whose rotation, where rows must be rebuilt, is sums and differences in registers.
// Two stages without rotation, and codes of a byte, are faster rebuilt row by row.
bool few_words(const Rows& rows) { return rows.stages == 1 && rows.stage[0].bits < 8; }
bool in_planes(const Rows& rows) { return rows.type == Type::CODEWORDS && rows.words.form == Form::PLANES; }
bool keys_in_lanes(const Problem& p) {
  const Rows& keys = p.keys;
  if (in_planes(keys)) return true;
  if (keys.type != Type::CODES || (!p.angles && !few_words(keys))) return false;
  return !p.angles || !keys.signs || (keys.odd == 1 && keys.dim >= POINTS && keys.dim <= 256);
}
bool values_in_lanes(const Rows& values) {
  return values.type == Type::CODES && few_words(values) && (!values.step || (values.by_token && values.group % 16 == 0));
}

// Where a span's numbers are: scores have rows of `row` floats, words and what is by token rows of `wide`.
struct Span {
  int head, token, count, row;
  int64_t wide;
  Ahead ahead;
};

// The codes of a head's rows from a token on, in pieces of which `pieces` make the span.
Ahead ahead_of(const Rows& rows, int head, int from, int count, int pieces) {
  if (rows.type != Type::CODES || count <= 0) return {};
  const Stage& stage = rows.stage[0];
  const uint8_t* at = stage.codes + head * stage.head + from * stage.row;
  return {at, at + count * stage.row, (count * stage.row / pieces + 63) / 64 * 64};
}

// The angles of a span from `token` on, while `calls` pieces of others are worked on.
Ahead angles_ahead(const Problem& p, int token, int calls) {
  const int left = p.count - token, count = left < p.span ? left : p.span;
  if (count <= 0) return {};
  const int64_t row = 8 * p.half;
  const auto* at = reinterpret_cast<const uint8_t*>(p.angles) + token * row;
  return {at, at + count * row, (count * row / calls + 63) / 64 * 64};
}

// What is by token beside a head's codes, asked for at once: it is little.
void ask_for_sides(const Rows& rows, int head, int from, int count) {
  auto ask = [&](Side side, int64_t numbers) {
    const int64_t bytes = numbers * (side.wide ? 4 : 2);
    const auto* at = static_cast<const uint8_t*>(side.at) + (int64_t(head) * rows.count + from) * bytes;
    for (const uint8_t* end = at + count * bytes; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  };
  if (rows.scale) ask(rows.scale, 1);
  if (!rows.step || !rows.by_token) return;
  const int groups = (rows.dim + rows.group - 1) / rows.group;
  ask(rows.step, groups), ask(rows.zero, groups);
}

// scores[r][t] of codes as cached, straight from their words.
void score_codes(const Problem& p, Span& span, const Turned* words, float* scratch, float* scores) {
  const Rows& keys = p.keys;
  const int R = p.padded_rows, from = p.k_from + span.token, dim = keys.dim;
  const float* q = p.turned + int64_t(span.head) * R * p.dim;
  float *base = scratch, *own = base + padded(R);
  for (int r = 0; r < R; r++) base[r] = 0;
  if (!keys.step) {
    dots_with_codes(keys.stage[0], words[0], dim, {q, p.dim}, R, base, padded(span.count), scores, span.row, span.ahead);
    return;
  }
  // A group's step is the query's, its zero a number; what is written behind a group's tokens is the next one's to overwrite.
  const int64_t groups = (keys.count + keys.group - 1) / keys.group;
  alignas(64) float step[MAX_DIM], zero[MAX_DIM];
  for (int t = 0; t < span.count;) {
    const int group = (from + t) / keys.group, next = (group + 1) * keys.group - from, stop = next < span.count ? next : span.count;
    widen(keys.step, (span.head * groups + group) * dim, dim, step);
    widen(keys.zero, (span.head * groups + group) * dim, dim, zero);
    for (int i = dim; i < p.dim; i++) step[i] = zero[i] = 0;
    for (int r = 0; r < R; r++) {
      V by_zero{};
      for (int i = 0; i < p.dim; i += W) {
        V x = load(q + r * p.dim + i);
        store(own + r * p.dim + i, x * load(step + i));
        by_zero += x * load(zero + i);
      }
      base[r] = 0;
      for (int i = 0; i < W; i++) base[r] += by_zero[i];
    }
    const Turned here{words[0].at + t, words[0].row};
    dots_with_codes(keys.stage[0], here, dim, {own, p.dim}, R, base, stop - t, scores + t, span.row, span.ahead);
    t = stop;
  }
}

// scores[r][t] of codes that must be rebuilt, a tile of tokens at a time.
void score_tiles(
    const Problem& p, Span& span, const Turned* words, const float* angles, const float* scale, const float* centred, float* scores) {
  alignas(64) float y[TILE * MAX_DIM];
  alignas(64) const float none[TILE] = {};
  const int R = p.padded_rows, from = p.k_from + span.token;
  const float* q = p.turned + int64_t(span.head) * R * p.dim;
  const float zero[4] = {};
  for (int t = 0; t < span.count; t += TILE) {
    const int count = span.count - t < TILE ? span.count - t : TILE;
    if (in_planes(p.keys))
      tile_planes(p.keys, span.head, words[0], t, count, y);
    else
      tile_rows(p.keys, span.head, words, from, t, count, scale, centred, y);
    if (p.angles) rope_entries(p, angles, t, y);
    span.ahead.next();
    with_rows(R, [&](auto block, int r) {
      constexpr int RB = decltype(block)::value;
      sums_of<RB>(q + r * p.dim, p.dim, 1, zero, {none, 0}, {y, TILE}, p.keys.dim, TILE, scores + r * span.row + t, span.row);
    });
  }
}

// scores[r][t] of rows of floats, or of codes that are rebuilt row by row.
void score_rows(const Problem& p, Span& span, float* scores) {
  alignas(64) float x[TILE * MAX_DIM];
  const int R = p.padded_rows;
  for (int t = 0; t < span.count; t += TILE) {
    const int count = span.count - t < TILE ? span.count - t : TILE, token = span.token + t;
    points(p.keys, span.head, p.k_from + token, count, x);
    for (int i = count * p.dim; i < TILE * p.dim; i++) x[i] = 0;
    if (p.angles) to_cached(p, span.head, token, count, x);
    dots({p.turned + int64_t(span.head) * R * p.dim, p.dim}, R, {x, p.dim}, p.dim, padded(count), scores + t, span.row);
  }
}

void score(const Problem& p, Span& span, const float* angles, float* scratch, float* scores) {
  const Rows& keys = p.keys;
  const int from = p.k_from + span.token, width = padded(span.count);
  float *scale = scratch, *centred = scale + span.wide, *rest = centred + span.wide;
  if (keys.scale) scales_of(keys, span.head, from, span.count, scale, centred);
  if (keys_in_lanes(p)) {
    Turned words[2];
    for (int s = 0; s < keys.stages; s++) {
      words[s] = turned(keys.stage[s], span.head, keys.dim, from, span.count, reinterpret_cast<uint32_t*>(rest), span.wide);
      rest += words_of(keys.stage[s], keys.dim) * span.wide;
    }
    if (in_planes(keys)) words[0] = turned(keys.words, span.head, from, span.count, reinterpret_cast<uint32_t*>(rest), span.wide);
    if (in_registers(p))
      with_rows(p.padded_rows, [&](auto block, int) {
        const float* q = p.turned + int64_t(span.head) * p.padded_rows * p.dim;
        const Asked to{angles, p.half, q, p.dim, scores, span.row};
        score_before_rope<decltype(block)::value>(keys, span.head, from, span.count, words, scale, centred, to, span.ahead);
      });
    else if (p.angles || in_planes(keys) || (keys.step && keys.by_token))
      score_tiles(p, span, words, angles, scale, centred, scores);
    else
      score_codes(p, span, words, rest, scores);
  } else {
    score_rows(p, span, scores);
  }
  if (!keys.scale || p.angles) return;
  const float* by_mean = p.by_mean + int64_t(span.head) * p.padded_rows;
  for (int r = 0; r < p.padded_rows; r++)
    for (int t = 0; t < width; t += W) {
      float* s = scores + r * span.row + t;
      store(s, load(s) * load(scale + t) + load(centred + t) * by_mean[r]);
    }
}

// sums = fade sums + weights times values; of values with a scale the weights have it already.
void add_rows(const Problem& p, Span& span, const float* weights, const float* fade, float* sums) {
  alignas(64) float x[TILE * MAX_DIM];
  float one[4] = {1, 1, 1, 1};
  for (int t = 0; t < span.count; t += TILE) {
    const int count = span.count - t < TILE ? span.count - t : TILE;
    points(p.values, span.head, p.v_from + span.token + t, count, x);
    with_rows(p.padded_rows, [&](auto block, int r) {
      constexpr int RB = decltype(block)::value;
      float* to = sums + r * p.dim_v;
      sums_of<RB>(weights + r * span.row + t, span.row, 1, t ? one : fade + r, {to, p.dim_v}, {x, p.dim_v}, count, p.dim_v, to, p.dim_v);
    });
  }
}

void add_codes(const Problem& p, Span& span, const float* weights, const float* fade, float* scratch, float* sums) {
  const Rows& values = p.values;
  const int R = p.padded_rows, dim = values.dim, from = p.v_from + span.token, width = padded(span.count);
  Matrix own{weights, span.row};
  int group = dim;
  float* extra = nullptr;
  if (values.step) {
    // A step is its token's weight, a zero a number: two of bfloat16 in each word of the turned rows.
    group = values.group;
    const bool wide = values.step.wide;
    const int groups = (dim + group - 1) / group, bytes = (wide ? 4 : 2) * groups;
    auto* words = reinterpret_cast<uint32_t*>(scratch);
    auto turn = [&](Side side) {
      auto bytes_of = [&](int64_t row) { return static_cast<const uint8_t*>(side.at) + row * bytes; };
      const int64_t rows = int64_t(values.heads) * values.count;
      turn_rows(bytes_of(int64_t(span.head) * values.count + from), bytes_of(rows), bytes, bytes, span.count, words, span.wide);
    };
    auto side_of = [&](int g, int t) {
      if (wide) return (V)load_words(words + g * span.wide + t);
      const Words both = load_words(words + g / 2 * span.wide + t);
      return (V)(g % 2 ? both & 0xffff0000u : both << 16u);
    };
    extra = scratch + (wide ? groups : (groups + 1) / 2) * span.wide;
    float* scaled = extra + padded(groups * R);
    turn(values.zero);
    for (int g = 0; g < groups; g++)
      for (int r = 0; r < R; r++) {
        V sum{};
        for (int t = 0; t < width; t += W) sum += load(weights + r * span.row + t) * side_of(g, t);
        extra[g * R + r] = 0;
        for (int i = 0; i < W; i++) extra[g * R + r] += sum[i];
      }
    turn(values.step);
    for (int g = 0; g < groups; g++)
      for (int r = 0; r < R; r++)
        for (int t = 0; t < width; t += W) store(scaled + (g * R + r) * span.row + t, load(weights + r * span.row + t) * side_of(g, t));
    own.at = scaled, scratch = scaled + int64_t(groups) * R * span.row;
  }
  const Turned words = turned(values.stage[0], span.head, dim, from, span.count, reinterpret_cast<uint32_t*>(scratch), span.wide);
  sums_with_codes(values.stage[0], words, dim, own, R, group, int64_t(R) * span.row, extra, width, fade, sums, p.dim_v, span.ahead);
}

int64_t most_words(const Rows& rows) {
  int64_t words = 0;
  for (int s = 0; s < rows.stages; s++) words += words_of(rows.stage[s], rows.dim);
  for (int head = 0; in_planes(rows) && head < rows.heads; head++)
    if (words_of(rows.words, head) > words) words = words_of(rows.words, head);
  return words;
}

size_t attend_scratch(const Problem& p) {
  const int R = p.padded_rows, row = p.span + BEYOND, groups = p.values.step ? (p.values.dim + p.values.group - 1) / p.values.group : 0;
  const int64_t wide = p.span + 2 * BEYOND;
  const int64_t keys = (most_words(p.keys) + 2) * wide + padded(R) + int64_t(R) * p.dim;
  const int64_t values = (most_words(p.values) + 2 + groups) * wide + padded(groups * R) + int64_t(groups) * R * row;
  return size_t(R) * (row + 1) + 16 + 2 * p.half * wide + (keys > values ? keys : values);
}

// Heads first to last of a chunk of tokens: they share its angles.
void attend(const Problem& p, int first, int last, int chunk, float* scratch) {
  const int R = p.padded_rows, begin = chunk * p.chunk, end = begin + p.chunk < p.count ? begin + p.chunk : p.count;
  Span span{0, 0, 0, p.span + BEYOND, p.span + 2 * BEYOND, {}};
  float *weights = scratch, *fade = weights + R * span.row, *turns = fade + padded(R), *rest = turns + 2 * p.half * span.wide;
  int lowest = p.count, highest = 0;
  for (int r = 0; r < p.rows; r++) {
    if (p.first[r] < lowest) lowest = p.first[r];
    if (p.stop[r] > highest) highest = p.stop[r];
  }
  for (int head = first; head < last; head++) {
    float* most = p.states + (int64_t(head) * p.chunks + chunk) * 3 * R;
    for (int r = 0; r < R; r++) most[r] = -INF, most[R + r] = most[2 * R + r] = 0;
    memset(p.sums + (int64_t(head) * p.chunks + chunk) * R * p.dim_v, 0, sizeof(float) * R * p.dim_v);
  }
  const Rows& values = p.values;
  const bool rebuilt = p.angles && keys_in_lanes(p);
  for (span.token = begin; span.token < end; span.token += p.span) {
    if (span.token + p.span <= lowest || span.token >= highest) continue;
    span.count = end - span.token < p.span ? end - span.token : p.span;
    const int width = padded(span.count);
    if (rebuilt && in_registers(p)) turn_folded(p, span.token, span.count, turns);
    else if (rebuilt) turn_angles(p, span.token, span.count, turns);
    const int next = span.token + p.span < end ? span.token + p.span : begin + p.ahead;
    Ahead angles;
    if (rebuilt) angles = angles_ahead(p, next, (last - first) * (p.span / (AT_ONCE * W) + values.dim / 4));
    for (span.head = first; span.head < last; span.head++) {
      const int head = span.head;
      float* sums = p.sums + (int64_t(head) * p.chunks + chunk) * R * p.dim_v;
      float* most = p.states + (int64_t(head) * p.chunks + chunk) * 3 * R;
      float *total = most + R, *with_mean = most + 2 * R, *scale = rest, *centred = scale + span.wide;
      const int pieces = span.count / (in_registers(p) ? AT_ONCE * W : 64) + 1;
      span.ahead = ahead_of(values, head, p.v_from + span.token, span.count, pieces);
      span.ahead.also = &angles;
      ask_for_sides(values, head, p.v_from + span.token, span.count);
      if (head + 1 < last) ask_for_sides(p.keys, head + 1, p.k_from + span.token, span.count);
      score(p, span, turns, rest, weights);
      if (values.scale) scales_of(values, head, p.v_from + span.token, span.count, scale, centred);
      for (int r = 0; r < R; r++) {
        float* w = weights + r * span.row;
        fade[r] = softmax(p, head, r, span.token, span.count, width, w, most[r], total[r]);
        if (!values.scale) continue;
        V with{};
        for (int t = 0; t < width; t += W) {
          V weight = load(w + t);
          with += weight * load(centred + t);
          store(w + t, weight * load(scale + t));
        }
        float added = 0;
        for (int i = 0; i < W; i++) added += with[i];
        with_mean[r] = with_mean[r] * fade[r] + added;
      }
      // What comes next are the keys of the next head, or of the next tokens.
      const bool more = head + 1 < last;
      const int token = more ? span.token : next, left = p.count - token;
      span.ahead = ahead_of(p.keys, more ? head + 1 : first, p.k_from + token, left < p.span ? left : p.span, values.dim / 4);
      span.ahead.also = &angles;
      if (values_in_lanes(values))
        add_codes(p, span, weights, fade, rest, sums);
      else
        add_rows(p, span, weights, fade, sums);
    }
  }
}

// Whether weighted sums of both are turned back by the same tables: what they are added up to is turned back once.
bool turned_alike(const Rows& a, const Rows& b) { return a.signs == b.signs && a.hartley == b.hartley && a.mix == b.mix; }

// Factor of what was summed with a maximum, now that another one is the base.
float faded(float most, float base) { return exp_negative(all(most - base))[0]; }

// Adds the sums of problems `found` that are turned alike, for row `row` of their queries, to `out`; returns how many of the first are.
int add_alike(const Found* found, int problems, int head, int row, float base, float& total, float* out) {
  alignas(64) float sum[MAX_DIM + W] = {};
  const Problem& first = *found->problem;
  const int dim_v = first.dim_v, every = first.values.mix ? padded(first.keys.components.first[first.keys.heads]) : 0;
  float* shared = nullptr;  // of all of them, in the place of the first one's
  int n = 0;
  for (; n < problems && turned_alike(found[n].problem->values, first.values); n++) {
    const Problem& p = *found[n].problem;
    const int R = p.padded_rows, r = found[n].row + row;
    float with_mean = 0;
    for (int c = 0; c < p.chunks; c++) {
      const float* state = p.states + (int64_t(head) * p.chunks + c) * 3 * R + r;
      const float weight = faded(state[0], base), *sums = p.sums + ((int64_t(head) * p.chunks + c) * R + r) * dim_v;
      total += weight * state[R], with_mean += weight * state[2 * R];
      for (int i = 0; i < dim_v; i += W) store(sum + i, load(sum + i) + load(sums + i) * weight);
      if (!every) continue;
      float* own = p.shared + ((int64_t(c) * p.keys.heads + head) * p.rows + r) * every;
      for (int i = 0; i < every; i += W) {
        const V x = load(own + i) * weight;
        store((shared ? shared : own) + i, shared ? load(shared + i) + x : x);
      }
      shared = shared ? shared : own;
    }
    if (p.values.mean)
      for (int i = 0; i < p.values.dim; i++) out[i] += with_mean * p.values.mean[int64_t(head) * p.values.dim + i];
  }
  if (first.values.signs) {
    const float norm = 1 / __builtin_sqrtf(float(first.values.dim)), *signs = first.values.signs + head * first.values.signs_head;
    transform(first.values, sum);
    for (int i = 0; i < first.values.dim; i++) sum[i] *= norm * signs[i];
  }
  for (int i = 0; i < dim_v; i += W) store(out + i, load(out + i) + load(sum + i));
  if (shared) add_predicted(first, head, shared, out);
  return n;
}

void merge(const Merging& m, int head) {
  alignas(64) float out[MAX_DIM + W];
  const int dim = m.found->problem->values.dim;
  for (int row = 0; row < m.groups * m.queries; row++) {
    const int64_t at = m.first + (int64_t(head) * m.groups + row / m.queries) * m.every + row % m.queries;
    float largest = m.most[at], *to = m.out + at * dim;
    for (int n = 0; n < m.problems; n++) {
      const Problem& p = *m.found[n].problem;
      const float* states = p.states + int64_t(head) * p.chunks * 3 * p.padded_rows + m.found[n].row + row;
      for (int c = 0; c < p.chunks; c++, states += 3 * p.padded_rows) largest = *states > largest ? *states : largest;
    }
    const float base = largest == -INF ? 0 : largest, fade = faded(m.most[at], base);
    memset(out, 0, sizeof out);
    for (int i = 0; i < dim; i++) out[i] = to[i] * fade;
    float total = m.total[at] * fade;
    for (int n = 0; n < m.problems;) n += add_alike(m.found + n, m.problems - n, head, row, base, total, out);
    memcpy(to, out, dim * sizeof(float));
    m.most[at] = largest, m.total[at] = total;
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
#define KVTOOL_SEARCHER_(x) x##_searcher
#define KVTOOL_SEARCHER(x) KVTOOL_SEARCHER_(x)
extern const Searcher KVTOOL_SEARCHER(KVTOOL_LEVEL);
#define KVTOOL_CALIBRATED_(x) x##_calibrated
#define KVTOOL_CALIBRATED(x) KVTOOL_CALIBRATED_(x)
extern const Calibrated KVTOOL_CALIBRATED(KVTOOL_LEVEL);
const Level KVTOOL_LEVEL = {
    KVTOOL_NAME(KVTOOL_LEVEL), &KVTOOL_ENCODER(KVTOOL_LEVEL), &KVTOOL_SEARCHER(KVTOOL_LEVEL), &KVTOOL_CALIBRATED(KVTOOL_LEVEL),
    KVTOOL_INSIDE::prepare, KVTOOL_INSIDE::attend_scratch, KVTOOL_INSIDE::attend, KVTOOL_INSIDE::merge, KVTOOL_INSIDE::decode, KVTOOL_INSIDE::attend_components_scratch, KVTOOL_INSIDE::attend_components,
    KVTOOL_INSIDE::decode_as, KVTOOL_INSIDE::turn};

}  // namespace kvtool
