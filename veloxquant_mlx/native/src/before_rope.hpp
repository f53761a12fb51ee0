// Scores of keys before RoPE whose pairs are the halves of a row, for up to 4 queries: rebuilt, rotated and multiplied in registers.
//
// The pair (a, b) of entries d and d + D/2 gives u = a C + b S and v = b C - a S. The tables hold what else is the same for all heads:
//     codes with a step and a zero:  C = cos, S = -sin
//     codes that were rotated:       Sylvester's last stage makes it f (a + b) and g (a - b), f and g signs. With C = cos - f g sin and
//                                    S = cos + f g sin that stage is done, too, for queries whose halves are times f and -g.
// A scale and the norm are the scores'; the mean over both is added before the last stage.
#pragma once
#include "columns.hpp"
#include "decode.hpp"
#include "signs.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int AT_ONCE = W >= 8 ? 2 : 1;  // vectors of tokens that share the loads of queries; more do not fit into registers

// Whether these keys can be taken so: a group's step is that of all tokens taken together.
bool in_registers(const Problem& p) {
  const Rows& keys = p.keys;
  if (!p.angles || p.padded_rows > 4 || p.rope_first || 2 * p.half != keys.dim || keys.type != Type::CODES) return false;
  if (keys.signs) return keys.odd == 1 && keys.dim > POINTS && keys.dim <= 256;
  const int together = AT_ONCE * W;
  return keys.step && !keys.by_token && keys.stages == 1 && keys.dim % 32 == 0 && keys.group % together == 0 && p.k_from % together == 0;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// W entries of W rows, turned.
inline void turn_floats(const float* const* rows, int at, V* out) {
  __m256 x[8], y[8];
  for (int i = 0; i < 8; i++) {
    // Of a row and of the fourth after it, halves beside each other: lanes need not change places afterwards.
    const float *low = rows[i % 4] + at + i / 4 * 4, *high = rows[i % 4 + 4] + at + i / 4 * 4;
    x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
  }
  for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      const __m256d a = _mm256_castps_pd(y[i + j]), b = _mm256_castps_pd(y[i + j + 2]);
      out[i + 2 * j] = (V)_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), out[i + 2 * j + 1] = (V)_mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
}

// The angles of tokens, turned, to C and S: at once, for the turned ones take longer to read again than to make. Halves are whole vectors.
void turn_folded(const Problem& p, int token, int count, float* turned) {
  const int half = p.half, row = 2 * half;
  const float *signs = p.keys.signs, *angles = p.angles + int64_t(token) * row;
  alignas(64) float sign[MAX_DIM / 2];
  for (int d = 0; signs && d < half; d++) sign[d] = signs[d] * signs[d + half];
  const auto* bytes = reinterpret_cast<const uint8_t*>(angles);
  Ahead ahead{bytes, reinterpret_cast<const uint8_t*>(p.angles + int64_t(p.count) * row), 32 * row * 4};
  ahead.next(), ahead.piece = W * W * 8;
  for (int t = 0; t < padded(count); t += W) {
    const float* rows[W];
    for (int i = 0; i < W; i++) rows[i] = angles + int64_t(t + i < count ? t + i : count - 1) * row;
    float* out = turned + t / ANGLES * row * ANGLES + t % ANGLES;
    for (int d = 0; d < half; d += W, ahead.next()) {
      V cos[W], sin[W];
      turn_floats(rows, d, cos), turn_floats(rows, half + d, sin);
      for (int i = 0; i < W; i++) {
        float *c = out + (d + i) * ANGLES, *s = c + half * ANGLES;
        if (signs) store(c, cos[i] - sin[i] * sign[d + i]), store(s, cos[i] + sin[i] * sign[d + i]);
        else store(c, cos[i]), store(s, -sin[i]);
      }
    }
  }
}
#else
// cos and sin of ANGLES tokens, turned, to C and S.
void fold(const Problem& p, float* turned) {
  const float* signs = p.keys.signs;
  for (int d = 0; d < p.half; d++) {
    float *c = turned + d * ANGLES, *s = c + p.half * ANGLES;
    const float sign = signs ? signs[d] * signs[d + p.half] : 1;
    for (int i = 0; i < ANGLES; i += W) {
      const V cos = load(c + i), sin = load(s + i) * sign;
      store(c + i, signs ? cos - sin : cos), store(s + i, signs ? cos + sin : -sin);
    }
  }
}

// The angles of tokens, turned, to C and S.
void turn_folded(const Problem& p, int token, int count, float* turned) {
  turn_angles(p, token, count, turned);
  for (int t = 0; t < count; t += ANGLES) fold(p, turned + t * 2 * p.half);
}
#endif

void fold_query(const Rows& keys, float* q) {
  for (int i = 0; i < keys.dim; i++) q[i] *= i < keys.dim / 2 ? keys.signs[i] : -keys.signs[i];
}

// Where RB queries, the tables of NB vectors of tokens, and their scores are.
struct Asked {
  const float* tables;  // of ANGLES tokens after ANGLES tokens
  int half;
  const float* q;
  int64_t q_row;
  float* scores;
  int64_t score_row;
};

template <int RB, int NB>
struct Sums {
  static constexpr int SETS = RB * NB < 8 ? 2 : 1;  // of accumulators, so that none waits for another
  V of[SETS][RB][NB] = {};

  inline __attribute__((always_inline)) void add(const Asked& to, int d, const V* a, const V* b) {
    V u[NB], v[NB];
    for (int n = 0; n < NB; n++) {
      const float* c = to.tables + (n * W / ANGLES * 2 * to.half + d) * ANGLES + n * W % ANGLES;
      const V C = load(c), S = load(c + to.half * ANGLES);
      u[n] = a[n] * C + b[n] * S, v[n] = b[n] * C - a[n] * S;
    }
    for (int r = 0; r < RB; r++) {
      const float* q = to.q + r * to.q_row + d;
      for (int n = 0; n < NB; n++) of[0][r][n] += u[n] * q[0];
      for (int n = 0; n < NB; n++) of[SETS - 1][r][n] += v[n] * q[to.half];
    }
  }

  void write(const Asked& to, const V* unit) {
    for (int r = 0; r < RB; r++)
      for (int n = 0; n < NB; n++) {
        const V sum = SETS == 2 ? of[0][r][n] + of[1][r][n] : of[0][r][n];
        store(to.scores + r * to.score_row + n * W, unit ? sum * unit[n] : sum);
      }
  }
};

// What a head's rows of a codec that rotates have in common: the mean in front of the last stage, and the least unit that it is divided by.
struct Mean {
  static V magnitude(V x) { return (V)((VI)x & 0x7fffffff); }
  alignas(64) float of[MAX_DIM];
  float least = 1e-37f;

  Mean(const Rows& rows, int head) {
    const int half = rows.dim / 2;  // whole vectors
    const float *mean = rows.mean ? rows.mean + int64_t(head) * rows.dim : nullptr, *signs = rows.signs;
    V most{};
    for (int d = 0; d < half; d += W) {
      V a{}, b{};
      if (mean) a = load(mean + d) * load(signs + d), b = load(mean + half + d) * load(signs + half + d);
      const V sum = (a + b) * 0.5f, difference = (a - b) * 0.5f;
      store(of + d, sum), store(of + half + d, difference);
      const V larger = magnitude(sum) > magnitude(difference) ? magnitude(sum) : magnitude(difference);
      most = larger > most ? larger : most;
    }
    // Points are lost beside 2^60 times as much, whatever their size; the quotient stays finite.
    for (int i = 0; i < W; i++) least = most[i] * 0x1p-60f > least ? most[i] * 0x1p-60f : least;
  }
};

// Factors of NB vectors of tokens: the unit of their points, and how often that is in the mean.
template <int NB>
struct Units {
  V unit[NB], over[NB];

  Units(const Mean& mean, const float* scale, const float* centred, float level) {
    for (int n = 0; n < NB; n++) {
      const V size = load(scale + n * W) * level, with = load(centred + n * W), least = all(mean.least);
      unit[n] = with > V{} && size < least ? least : size;
      over[n] = with > V{} ? with / unit[n] : V{};
    }
  }
};

#if defined(__AVX2__)
// Scores of signs. Bit d of a row is bit i of byte j of word k: the stages over i, then over the K words of a half, are of bytes, exact up
// to 32; those over j make integers.
template <int K, int RB, int NB>
void score_signs(Turned words, int t, const Mean& mean, const Units<NB>& units, const Asked& to) {
  static constexpr OfNibbles TABLES{};
  alignas(64) int8_t stored[NB][2 * K][8][4 * W];
  for (int n = 0; n < NB; n++)
    for (int h = 0; h < 2; h++) {
      Bytes low[K], high[K];
      for (int k = 0; k < K; k++) {
        const Words x = load_words(words.at + (h * K + k) * words.row + t + n * W);
        low[k] = (Bytes)(x & 0x0f0f0f0fu), high[k] = (Bytes)(x >> 4u & 0x0f0f0f0fu);
      }
      for (int i = 0; i < 4; i++) {
        Bytes a[K], b[K];
        for (int k = 0; k < K; k++) {
          const Bytes x = pick(TABLES.of[i], low[k]), y = pick(TABLES.of[i], high[k]);
          a[k] = x + y, b[k] = x - y;
        }
        combine<K>(a), combine<K>(b);
        for (int k = 0; k < K; k++) memcpy(stored[n][h * K + k][i], &a[k], 4 * W), memcpy(stored[n][h * K + k][i + 4], &b[k], 4 * W);
      }
    }
  Sums<RB, NB> sums;
  for (int k = 0; k < K; k++)
    for (int i = 0; i < 8; i++) {
      V both[2][NB][4];
      for (int n = 0; n < NB; n++)
        for (int h = 0; h < 2; h++) {
          Bytes x;
          memcpy(&x, stored[n][h * K + k][i], 4 * W);
          of_bytes(x, both[h][n]);
        }
      unrolled<4>([&](auto j) __attribute__((always_inline)) {
        const int d = 32 * k + 8 * j.value + i;
        V a[NB], b[NB];
        for (int n = 0; n < NB; n++)
          a[n] = both[0][n][j.value] + units.over[n] * mean.of[d], b[n] = both[1][n][j.value] + units.over[n] * mean.of[to.half + d];
        sums.add(to, d, a, b);
      });
    }
  sums.write(to, units.unit);
}
#endif

// Scores of points with N POINTS entries: four stages of POINTS entries, stored, then those of N / 2.
template <int N, int RB, int NB>
void score_points(const Rows& rows, const Turned* words, int t, const Mean& mean, const Units<NB>& units, const Asked& to) {
  alignas(64) float x[NB][POINTS * N * W];
  with_bits(rows.stage[0].bits, [&](auto bits) {
    for (int n = 0; n < NB; n++) first_stages<decltype(bits)::value>(rows, words, t + n * W, x[n]);
  });
  Sums<RB, NB> sums;
  for (int i = 0; i < POINTS; i++) {
    V v[NB][N];
    for (int n = 0; n < NB; n++) {
      for (int j = 0; j < N; j++) v[n][j] = load(x[n] + (i + POINTS * j) * W);
      combine<N / 2>(v[n]), combine<N / 2>(v[n] + N / 2);
    }
    unrolled<N / 2>([&](auto j) __attribute__((always_inline)) {
      const int d = i + POINTS * j.value;
      V a[NB], b[NB];
      for (int n = 0; n < NB; n++)
        a[n] = v[n][j.value] + units.over[n] * mean.of[d], b[n] = v[n][j.value + N / 2] + units.over[n] * mean.of[to.half + d];
      sums.add(to, d, a, b);
    });
  }
  sums.write(to, units.unit);
}

template <int RB>
void score_rotated(const Rows& rows, const Turned* words, int t, const Mean& mean, const float* scale, const float* centred, const Asked& to) {
  const float norm = 1 / __builtin_sqrtf(float(rows.dim));
  constexpr int NB = AT_ONCE;
#if defined(__AVX2__)
  const float* table = rows.stage[0].table;
  if (rows.stages == 1 && rows.stage[0].bits == 1 && rows.dim % 64 == 0 && table[1] > 0 && table[0] == -table[1]) {
    const Units<NB> units(mean, scale + t, centred + t, norm * table[1]);
    if (rows.dim == 64) return score_signs<1, RB, NB>(words[0], t, mean, units, to);
    if (rows.dim == 128) return score_signs<2, RB, NB>(words[0], t, mean, units, to);
    return score_signs<4, RB, NB>(words[0], t, mean, units, to);
  }
#endif
  const Units<NB> units(mean, scale + t, centred + t, norm);
  switch (rows.dim / POINTS) {
    case 2: return score_points<2, RB, NB>(rows, words, t, mean, units, to);
    case 4: return score_points<4, RB, NB>(rows, words, t, mean, units, to);
    case 8: return score_points<8, RB, NB>(rows, words, t, mean, units, to);
    default: return score_points<16, RB, NB>(rows, words, t, mean, units, to);
  }
}

// The codes of a channel with one step and one zero: of up to 4 bits looked up among all that they can be, where a register holds these.
template <int BITS>
struct Channel {
#if defined(__AVX512F__)
  static constexpr bool TABLE = BITS <= 4;
#else
  static constexpr bool TABLE = false;
#endif
  V step, zero;

  Channel(float step, float zero) : step(all(step)), zero(all(zero)) {
    if constexpr (TABLE) this->zero += (V)Numbers() * step;
  }
  static V Numbers() {
    V x;
    for (int i = 0; i < W; i++) x[i] = float(i % (1 << BITS));
    return x;
  }
  V of(Words codes) const {
#if defined(__AVX512F__)
    if constexpr (TABLE) return (V)_mm512_permutexvar_ps((__m512i)codes, (__m512)zero);
#endif
    return __builtin_convertvector((VI)(codes & ((1u << BITS) - 1)), V) * step + zero;
  }
};

// Scores of codes with a step and a zero for each channel.
template <int BITS, int RB, int NB>
void score_channels(Turned words, int t, const float* step, const float* zero, const Asked& to) {
  constexpr int RUN = 8;  // entries whose codes start in a byte
  Sums<RB, NB> sums;
  for (int d0 = 0; d0 < to.half; d0 += RUN) {
    const int bit = d0 * BITS, other = bit + to.half * BITS;
    unrolled<RUN>([&](auto number) __attribute__((always_inline)) {
      constexpr int i = decltype(number)::value;
      const Channel<BITS> first(step[d0 + i], zero[d0 + i]), second(step[to.half + d0 + i], zero[to.half + d0 + i]);
      V a[NB], b[NB];
      for (int n = 0; n < NB; n++) {
        const Turned own{words.at + bit / 32 * words.row + t + n * W, words.row};
        const Turned at{words.at + other / 32 * words.row + t + n * W, words.row};
        a[n] = first.of(codes_at<BITS>(own, bit % 32 + i * BITS)), b[n] = second.of(codes_at<BITS>(at, other % 32 + i * BITS));
      }
      sums.add(to, d0 + i, a, b);
    });
  }
  sums.write(to, nullptr);
}

// scores[r][t] of `count` tokens from row `from` on, of all queries of a head. `scale` and `centred` of those tokens, or none.
template <int RB>
void score_before_rope(
    const Rows& rows, int head, int from, int count, const Turned* words, const float* scale, const float* centred, Asked to, Ahead& ahead) {
  constexpr int TOKENS = AT_ONCE * W;
  const float* tables = to.tables;
  float* scores = to.scores;
  const auto each = [&](auto score) {
    for (int t = 0; t < count; t += TOKENS, ahead.next()) {
      to.tables = tables + t / ANGLES * 2 * to.half * ANGLES + t % ANGLES, to.scores = scores + t;
      score(t);
    }
  };
  if (rows.signs) {
    const Mean mean(rows, head);
    return each([&](int t) { score_rotated<RB>(rows, words, t, mean, scale, centred, to); });
  }
  alignas(64) float step[MAX_DIM], zero[MAX_DIM];
  const int64_t groups = (rows.count + rows.group - 1) / rows.group;
  with_bits(rows.stage[0].bits, [&](auto bits) {
    each([&](int t) {
      const int64_t at = (head * groups + (from + t) / rows.group) * rows.dim;
      if (t == 0 || (from + t) % rows.group == 0) widen(rows.step, at, rows.dim, step), widen(rows.zero, at, rows.dim, zero);
      score_channels<decltype(bits)::value, RB, AT_ONCE>(words[0], t, step, zero, to);
    });
  });
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
