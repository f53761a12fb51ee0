// Attention to coded rows with the tokens in the lanes: the words of codes are turned once, and a code is then a shift and a look-up.
//
// The scores of a span of tokens, and the weighted sums of its values, take codes straight from the turned words. Keys that are rotated, or
// have a step for each token, are rebuilt entry by entry. Sylvester's matrix, which undoes a randomised rotation, is sums and differences of
// whole vectors then, and its last stages, RoPE and the scores are one pass in registers.
#pragma once
#include "fours.hpp"
#include "lookup.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "sides.hpp"
#include "simd.hpp"
#include "sylvester.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int BEYOND = 32;  // tokens behind a span that may be written to
constexpr int POINTS = 16;  // entries of a row that are transformed in registers
constexpr int ANGLES = 16;  // tokens whose turned angles lie together: whole vectors of every level

// f(Number<0>()) to f(Number<N - 1>()): a loop that is unrolled whatever a compiler thinks of its size, so that arrays stay in registers.
template <int N, class F>
inline __attribute__((always_inline)) void unrolled(F f) {
  if constexpr (N > 0) unrolled<N - 1>(f), f(Number<N - 1>());
}

// f(Number<RB>, r) for blocks of 4, 2 or 1 of R queries.
template <class F>
void with_rows(int rows, F f) {
  const int step = rows < 4 ? rows : 4;
  for (int r = 0; r < rows; r += step) {
    if (step == 4) f(Number<4>(), r);
    if (step == 2) f(Number<2>(), r);
    if (step == 1) f(Number<1>(), r);
  }
}

// Turned words of a stage's codes.
struct Turned {
  uint32_t* at;
  int64_t row;
};

// The codes from `bit` on of W tokens in the lowest bits of their lanes, whatever is above.
template <int BITS>
Words codes_at(Turned words, int bit) {
  const uint32_t* at = words.at + bit / 32 * words.row;
  Words code = load_words(at) >> uint32_t(bit % 32);
  if (32 % BITS != 0 && bit % 32 + BITS > 32) code |= load_words(at + words.row) << uint32_t(32 - bit % 32);
  return code;
}

template <int BITS>
V points_of(const Lookup<BITS>& lookup, Words codes) {
  if (lookup.values) return lookup.of(codes);
  return __builtin_convertvector((VI)(codes & ((1u << BITS) - 1)), V);
}

// scores[r] = base[r] + <q[r], points> of NB W tokens.
template <int BITS, int RB, int NB>
void dots_with(const Lookup<BITS>& lookup, Turned words, int dim, Matrix q, const float* base, float* scores, int64_t row) {
  V sum[RB][NB];
  for (int r = 0; r < RB; r++)
    for (int n = 0; n < NB; n++) sum[r][n] = V{};
  auto step = [&](int d, const Words* codes) {
    V x[NB];
    for (int n = 0; n < NB; n++) x[n] = points_of<BITS>(lookup, codes[n]);
    for (int r = 0; r < RB; r++) {
      V weight = all(q.at[r * q.row + d]);
      for (int n = 0; n < NB; n++) sum[r][n] += weight * x[n];
    }
  };
  Words codes[NB];
  if constexpr (32 % BITS == 0) {
    for (int d = 0; d < dim; words.at += words.row) {
      const int stop = d + 32 / BITS < dim ? d + 32 / BITS : dim;
      for (int n = 0; n < NB; n++) codes[n] = load_words(words.at + n * W);
      for (; d < stop; d++) {
        step(d, codes);
        for (int n = 0; n < NB; n++) codes[n] >>= uint32_t(BITS);
      }
    }
  } else {
    for (int d = 0; d < dim; d++) {
      for (int n = 0; n < NB; n++) codes[n] = codes_at<BITS>({words.at + n * W, words.row}, d * BITS);
      step(d, codes);
    }
  }
  for (int r = 0; r < RB; r++)
    for (int n = 0; n < NB; n++) store(scores + r * row + n * W, sum[r][n] + base[r]);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same of 4-bit codes and 2 W tokens. Queries are zero from `dim` to a multiple of 8.
template <int RB>
void dots_with(const Planes& planes, Turned words, int dim, Matrix q, const float* base, float* scores, int64_t row) {
  constexpr int SETS = 4 / RB;  // of accumulators, so that none waits for another
  V sum[SETS][RB][2] = {};
  for (int d = 0; d < dim; d += 8, words.at += words.row) {
    Words both[2];
    pair_bytes(load_words(words.at), load_words(words.at + W), both);
    unrolled<4>([&](auto number) __attribute__((always_inline)) {
      constexpr int n = decltype(number)::value, half = n / 2, upper = n % 2;
      V x[4];
      planes.values<upper>(both[half], x);
      for (int j = 0; j < 2; j++)
        for (int r = 0; r < RB; r++) {
          const V weight = all(q.at[r * q.row + d + 4 * half + 2 * j + upper]);
          for (int i = 0; i < 2; i++) sum[n % SETS][r][i] += weight * x[2 * j + i];
        }
    });
  }
  for (int r = 0; r < RB; r++)
    for (int i = 0; i < 2; i++) {
      V x = sum[0][r][i] + base[r];
      for (int s = 1; s < SETS; s++) x += sum[s][r][i];
      store(scores + r * row + i * W, x);
    }
}
#endif

// Of R queries and `width` tokens, or some more.
void dots_with_codes(
    const Stage& stage, Turned words, int dim, Matrix q, int rows, const float* base, int width, float* scores, int64_t row, Ahead& ahead) {
  constexpr int NB = W == 8 ? 2 : 4;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (stage.bits == 4) {
    const Planes planes(stage.table);
    return with_rows(rows, [&](auto block, int r) {
      for (int t = 0; t < width; t += 2 * W, ahead.next())
        dots_with<decltype(block)::value>(
            planes, {words.at + t, words.row}, dim, {q.at + r * q.row, q.row}, base + r, scores + r * row + t, row);
    });
  }
#endif
  with_bits(stage.bits, [&](auto bits) {
    constexpr int BITS = decltype(bits)::value;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (BITS <= 2)
      if (width >= FEWEST)
        return with_rows(rows, [&](auto block, int r) {
          Fours<decltype(block)::value> sums;
          sums.template make<BITS>({q.at + r * q.row, q.row}, dim, stage.table);
          for (int t = 0; t < width; t += TAKEN, ahead.next())
            dots_of_fours(sums, words.at + t, words.row, base + r, scores + r * row + t, row);
        });
#endif
    const Lookup<BITS> lookup(stage.table);
    with_rows(rows, [&](auto block, int r) {
      constexpr int RB = decltype(block)::value;
      const Matrix own{q.at + r * q.row, q.row};
      int t = 0;
      for (; t + NB * W <= width; t += NB * W, ahead.next())
        dots_with<BITS, RB, NB>(lookup, {words.at + t, words.row}, dim, own, base + r, scores + r * row + t, row);
      for (; t < width; t += W)
        dots_with<BITS, RB, 1>(lookup, {words.at + t, words.row}, dim, own, base + r, scores + r * row + t, row);
    });
  });
}

// sums[r][d] = fade[r] sums[r][d] + extra[r] + sum over tokens of weights[r] points[d], for W / RB entries from d on.
template <int BITS, int RB>
void sums_with(
    const Lookup<BITS>& lookup, Turned words, int d, int dim, Matrix weights, int width, const float* fade, const float* extra, float* sums,
    int64_t row) {
  constexpr int CB = W / RB;
  V sum[W];
  for (int i = 0; i < W; i++) sum[i] = V{};
  auto step = [&](int t, int j, Words codes) {
    V x = points_of<BITS>(lookup, codes);
    for (int r = 0; r < RB; r++) sum[r * CB + j] += load(weights.at + r * weights.row + t) * x;
  };
  if constexpr (32 % (CB * BITS) == 0) {
    const int bit = d * BITS;
    for (int t = 0; t < width; t += W) {
      Words codes = load_words(words.at + bit / 32 * words.row + t) >> uint32_t(bit % 32);
      for (int j = 0; j < CB; j++, codes >>= uint32_t(BITS)) step(t, j, codes);
    }
  } else {
    for (int t = 0; t < width; t += W)
      for (int j = 0; j < CB; j++) step(t, j, codes_at<BITS>({words.at + t, words.row}, (d + j < dim ? d + j : dim - 1) * BITS));
  }
  // Beside `sums`, whose result has the lanes in the order of the accumulators. Vectors by hand: of conditions in a loop a compiler makes
  // masked loads from nullptr, which cost hundreds of cycles each.
  typedef float Row __attribute__((vector_size(4 * CB)));
  Row together[RB];
  const V all_of_it = KVTOOL_INSIDE::sums(sum);
  memcpy(together, &all_of_it, sizeof together);
  for (int r = 0; r < RB; r++) {
    Row x;
    memcpy(&x, sums + r * row + d, sizeof x);
    x = x * fade[r] + (together[r] + extra[r]);
    memcpy(sums + r * row + d, &x, sizeof x);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Of sums as `sums_with` finds them, entries within queries, those of each query: two queries' four entries, of one query all, or of four
// queries two entries that are two apart.
inline void by_query(V (&)[1]) {}
inline void by_query(V (&x)[2]) {
  const __m256 a = (__m256)x[0], b = (__m256)x[1];
  x[0] = (V)_mm256_permute2f128_ps(a, b, 0x20), x[1] = (V)_mm256_permute2f128_ps(a, b, 0x31);
}
inline void by_query(V (&x)[4]) {
  const __m256 a = (__m256)x[0], b = (__m256)x[1], c = (__m256)x[2], d = (__m256)x[3];
  const __m256 even = _mm256_unpacklo_ps(a, b), other = _mm256_unpacklo_ps(c, d), odd = _mm256_unpackhi_ps(a, b), last = _mm256_unpackhi_ps(c, d);
  x[0] = (V)_mm256_permute2f128_ps(even, other, 0x20), x[1] = (V)_mm256_permute2f128_ps(odd, last, 0x20);
  x[2] = (V)_mm256_permute2f128_ps(even, other, 0x31), x[3] = (V)_mm256_permute2f128_ps(odd, last, 0x31);
}

// The same of 4-bit codes, for the 8 entries of words whose bytes are paired.
template <int RB>
void sums_with(
    const Planes& planes, const uint32_t* pairs, Matrix weights, int width, const float* fade, const float* extra, float* sums, int64_t row,
    Ahead& ahead) {
  constexpr int CB = W / RB;  // entries at a time
  V found[RB];
  unrolled<RB>([&](auto number) __attribute__((always_inline)) {
    // Every other entry of four, all of four, or all of eight.
    constexpr int n = decltype(number)::value, FIRST = CB == 2 ? n / 2 * 4 + n % 2 : n * 4;
    V sum[W] = {};
    for (int t = 0; t < width; t += 2 * W)
      unrolled<(CB + 1) / 2>([&](auto part) __attribute__((always_inline)) {
        constexpr int m = decltype(part)::value, half = (FIRST + m / 2 * 4) / 4, upper = CB == 2 ? n % 2 : m % 2;
        V x[4];
        planes.values<upper>(load_words(pairs + t + half * W), x);
        for (int i = 0; i < 2; i++)
          for (int r = 0; r < RB; r++) {
            const V weight = load(weights.at + r * weights.row + t + i * W);
            for (int j = 0; j < 2; j++) sum[r * CB + (CB == 2 ? j : m / 2 * 4 + 2 * j + upper)] += weight * x[2 * j + i];
          }
      });
    found[n] = KVTOOL_INSIDE::sums(sum);
    ahead.next();
  });
  by_query(found);
  for (int r = 0; r < RB; r++) store(sums + r * row, load(sums + r * row) * fade[r] + (found[r] + extra[r]));
}
#endif

// `weights` of the first `group` entries, then, `step` further, of the next; `extra` of each group and query, or none.
void sums_with_codes(
    const Stage& stage, Turned words, int dim, Matrix weights, int rows, int group, int64_t step, const float* extra, int width,
    const float* fade, float* sums, int64_t row, Ahead& ahead) {
  static const float none[4] = {};
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (stage.bits == 4) {
    const Planes planes(stage.table);
    for (int d = 0; d < dim; d += 8, words.at += words.row) {
      for (int t = 0; t < width; t += 2 * W) {
        Words both[2];
        pair_bytes(load_words(words.at + t), load_words(words.at + t + W), both);
        store_words(words.at + t, both[0]), store_words(words.at + t + W, both[1]);
      }
      const int g = d / group;
      with_rows(rows, [&](auto block, int r) {
        const Matrix own{weights.at + g * step + r * weights.row, weights.row};
        const float* more = extra ? extra + g * rows + r : none;
        sums_with<decltype(block)::value>(planes, words.at, own, width, fade + r, more, sums + r * row + d, row, ahead);
      });
    }
    return;
  }
#endif
  with_bits(stage.bits, [&](auto bits) {
    constexpr int BITS = decltype(bits)::value;
    const Lookup<BITS> lookup(stage.table);
    with_rows(rows, [&](auto block, int r) {
      constexpr int RB = decltype(block)::value;
      for (int d = 0; d < dim; d += W / RB) {
        const int g = d / group;
        const Matrix own{weights.at + g * step + r * weights.row, weights.row};
        const float* more = extra ? extra + g * rows + r : none;
        sums_with<BITS, RB>(lookup, words, d, dim, own, width, fade + r, more, sums + r * row, row);
        ahead.next();
      }
    });
  });
}

int64_t words_of(const Stage& stage, int dim) { return (int64_t(dim) * stage.bits + 31) / 32; }

// The words of a stage's codes, tokens `from` to from + count, in `out`.
Turned turned(const Stage& stage, int head, int dim, int from, int count, uint32_t* out, int64_t row) {
  turn_rows(stage.codes + head * stage.head + from * stage.row, stage.end, stage.row, (dim * stage.bits + 7) / 8, count, out, row);
  return {out, row};
}

// Points of one tile, entry by entry: y[d][TILE].
void tile_points(const Rows& rows, const Turned* words, int t, float* y) {
  for (int s = 0; s < rows.stages; s++)
    with_bits(rows.stage[s].bits, [&](auto bits) {
      constexpr int BITS = decltype(bits)::value;
      const Lookup<BITS> lookup(rows.stage[s].table);
      for (int d = 0; d < rows.dim; d++)
        for (int i = 0; i < TILE; i += W) {
          float* to = y + d * TILE + i;
          V x = points_of<BITS>(lookup, codes_at<BITS>({words[s].at + t + i, words[s].row}, d * BITS));
          store(to, s ? load(to) + x : x);
        }
    });
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same of one stage of 4-bit codes.
inline void first_stages(const Planes& planes, Turned words, int dim, int t, float* x) {
  const DifferenceOfProduct minus;
  for (int d = 0; d < dim; d += POINTS, words.at += 2 * words.row) {
    Words both[2];
    pair_bytes(load_words(words.at + t), load_words(words.at + words.row + t), both);
    // Entries d, d + 8, d + 2, d + 10 come together, then those 4 further, then those beside both: so few are held at a time.
    V v[4], even[8], odd[4];
    planes.values<0>(both[0], even), combine<4>(even, minus);
    planes.values<0>(both[1], v), combine<4>(v, minus);
    for (int i = 0; i < 4; i++) even[4 + i] = minus(even[i], v[i]), even[i] += v[i];
    planes.values<1>(both[0], odd), combine<4>(odd, minus);
    planes.values<1>(both[1], v), combine<4>(v, minus);
    for (int i = 0; i < 4; i++) {
      float* to = x + (d + i / 2 * 2 + i % 2 * 8) * W;
      const V sum = odd[i] + v[i], difference = minus(odd[i], v[i]);
      store(to, even[i] + sum), store(to + W, minus(even[i], sum));
      store(to + 4 * W, even[4 + i] + difference), store(to + 5 * W, minus(even[4 + i], difference));
    }
  }
}
#endif

// The first of Sylvester's stages, of POINTS entries at a time: x[d][W].
template <int BITS>
void first_stages(const Rows& rows, const Turned* words, int t, float* x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (BITS == 4)
    if (rows.stages == 1) return first_stages(Planes(rows.stage[0].table), words[0], rows.dim, t, x);
#endif
  const Lookup<BITS> lookup(rows.stage[0].table);
  for (int d = 0; d < rows.dim; d += POINTS) {
    V v[POINTS];
    const int bit = d * BITS;
    const Turned own{words[0].at + bit / 32 * words[0].row + t, words[0].row};
    for (int i = 0; i < POINTS; i++) v[i] = lookup.of(codes_at<BITS>(own, (BITS % 2 ? bit % 32 : 0) + i * BITS));
    if (rows.stages == 2)
      with_bits(rows.stage[1].bits, [&](auto bits) {
        constexpr int SECOND = decltype(bits)::value;
        const Lookup<SECOND> other(rows.stage[1].table);
        for (int i = 0; i < POINTS; i++) v[i] += other.of(codes_at<SECOND>({words[1].at + t, words[1].row}, (d + i) * SECOND));
      });
    combine<POINTS>(v, DifferenceOfProduct());
    for (int i = 0; i < POINTS; i++) store(x + (d + i) * W, v[i]);
  }
}

// The other stages, of N = D / POINTS, and what makes rows of points: y[d][TILE].
template <int N>
void last_stages(const Rows& rows, int head, const float* x, V scale, V centred, float* y) {
  alignas(64) static const float none[MAX_DIM] = {};
  const float *mean = rows.mean ? rows.mean + int64_t(head) * rows.dim : none, *signs = rows.signs;
  for (int i = 0; i < POINTS; i++) {
    V v[N];
    for (int j = 0; j < N; j++) v[j] = load(x + (i + POINTS * j) * W);
    combine<N>(v);
    for (int j = 0; j < N; j++) {
      const int d = i + POINTS * j;
      store(y + d * TILE, v[j] * (scale * signs[d]) + centred * mean[d]);
    }
  }
}

// Scale and sign of stored scales: 1 where the row has the mean.
void scales_of(const Rows& rows, int head, int from, int count, float* scale, float* centred) {
  const int64_t first = int64_t(head) * rows.count + from;
  int t = 0;
  if (rows.scale.wide) {
    widen(rows.scale, first, count, scale);
    for (; t < count; t++) centred[t] = 1;
    for (; t < padded(count); t++) scale[t] = centred[t] = 0;
    return;
  }
  const uint16_t* stored = static_cast<const uint16_t*>(rows.scale.at) + first;
  for (; t + W <= count; t += W) {
    V x = load_bfloat(stored + t);
    VI bits = (VI)x;
    store(scale + t, (V)(bits & 0x7fffffff));
    store(centred + t, bits < 0 ? V{} : all(1.0f));
  }
  for (; t < count; t++) scale[t] = bfloat(stored[t] & 0x7fff), centred[t] = stored[t] < 0x8000;
  for (; t < padded(count); t++) scale[t] = centred[t] = 0;
}

// W rows of a codec that rotates, to y[d][TILE].
void rotated_rows(const Rows& rows, int head, const Turned* words, int t, const float* scale, const float* centred, float* y) {
  alignas(64) float x[256 * W];
  const float norm = 1 / __builtin_sqrtf(float(rows.dim));
  with_bits(rows.stage[0].bits, [&](auto bits) { first_stages<decltype(bits)::value>(rows, words, t, x); });
  const V size = load(scale + t) * norm, with = load(centred + t);
  switch (rows.dim / POINTS) {
    case 1: return last_stages<1>(rows, head, x, size, with, y);
    case 2: return last_stages<2>(rows, head, x, size, with, y);
    case 4: return last_stages<4>(rows, head, x, size, with, y);
    case 8: return last_stages<8>(rows, head, x, size, with, y);
    default: return last_stages<16>(rows, head, x, size, with, y);
  }
}

// Rows of one tile, entry by entry, from turned words: y[d][TILE].
void tile_rows(
    const Rows& rows, int head, const Turned* words, int from, int t, int count, const float* scale, const float* centred, float* y) {
  if (rows.signs) {
    for (int i = 0; i < count; i += W) rotated_rows(rows, head, words, t + i, scale, centred, y + i);
    return;
  }
  tile_points(rows, words, t, y);
  if (rows.scale)
    for (int d = 0; d < rows.dim; d++)
      for (int i = 0; i < TILE; i += W) {
        V x = load(y + d * TILE + i) * load(scale + t + i);
        store(y + d * TILE + i, rows.mean ? x + load(centred + t + i) * rows.mean[int64_t(head) * rows.dim + d] : x);
      }
  if (!rows.step) return;
  const int dim = rows.dim;
  if (rows.by_token) {
    const int groups = (dim + rows.group - 1) / rows.group;
    alignas(64) float step[TILE] = {}, zero[TILE] = {};
    for (int g = 0; g < groups; g++) {
      for (int i = 0; i < count; i++) {
        const int64_t at = (int64_t(head) * rows.count + from + t + i) * groups + g;
        step[i] = one_of(rows.step, at), zero[i] = one_of(rows.zero, at);
      }
      for (int d = g * rows.group; d < dim && d < (g + 1) * rows.group; d++)
        for (int i = 0; i < TILE; i += W) store(y + d * TILE + i, load(y + d * TILE + i) * load(step + i) + load(zero + i));
    }
    return;
  }
  const int64_t groups = (rows.count + rows.group - 1) / rows.group;
  alignas(64) float step[MAX_DIM], zero[MAX_DIM];
  for (int i = 0; i < count;) {
    const int group = (from + t + i) / rows.group, next = (group + 1) * rows.group - (from + t), stop = next < count ? next : count;
    widen(rows.step, (head * groups + group) * dim, dim, step);
    widen(rows.zero, (head * groups + group) * dim, dim, zero);
    if (i == 0 && next >= count) {
      for (int d = 0; d < dim; d++)
        for (int j = 0; j < TILE; j += W) store(y + d * TILE + j, load(y + d * TILE + j) * step[d] + zero[d]);
      return;
    }
    for (int d = 0; d < dim; d++)
      for (int j = i; j < stop; j++) y[d * TILE + j] = y[d * TILE + j] * step[d] + zero[d];
    i = stop;
  }
}

// The cosines and sines of tokens, turned: [tokens / ANGLES][2 half][ANGLES].
void turn_angles(const Problem& p, int token, int count, float* out) {
  const int row = 2 * p.half, bytes = row * 4;
  const auto bytes_of = [&](int64_t at) { return reinterpret_cast<const uint8_t*>(p.angles + at * row); };
  Ahead ahead{bytes_of(token), bytes_of(token + count), 3 * bytes * ANGLES};
  for (int t = 0; t < count; t += ANGLES, out += row * ANGLES) {
    ahead.next(), ahead.piece = bytes * ANGLES;
    const int some = count - t < ANGLES ? count - t : ANGLES;
    turn_rows(bytes_of(token + t), bytes_of(p.count), bytes, bytes, some, reinterpret_cast<uint32_t*>(out), ANGLES);
  }
}

// Rotate the pairs of entries of a tile, TILE tokens from t on, by turned angles of its span.
void rope_entries(const Problem& p, const float* angles, int t, float* y) {
  const int sines = p.half * ANGLES;
  for (int i = 0; i < TILE; i += W) {
    const float* cos = angles + (t + i) / ANGLES * 2 * sines + i % ANGLES;
    for (int j = 0; j < p.half; j++) {
      float *a = y + (p.rope_first + j) * TILE + i, *b = a + p.half * TILE;
      const V u = load(a), v = load(b), c = load(cos + j * ANGLES), s = load(cos + j * ANGLES + sines);
      store(a, u * c - v * s), store(b, u * s + v * c);
    }
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
