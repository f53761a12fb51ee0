// Encoding of W rows side by side, for AVX2: rows lie in the lanes, so that a row's sums, its scale and its rotation take no shuffles. Of
// head sizes 64 and 128 and codes of up to four bits. Included by encode.cpp, whose sums it takes in the same order.
#pragma once
#include "coding.hpp"
#include "lookup.hpp"
#include "simd.hpp"
#include "sylvester.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

inline V square_root(V x) { return (V)_mm256_sqrt_ps((__m256)x); }

inline V in_halves(const V* x) {
  V two[2];
  for (int i = 0; i < 2; i++) two[i] = ((x[i] + x[i + 8]) + (x[i + 4] + x[i + 12])) + ((x[i + 2] + x[i + 10]) + (x[i + 6] + x[i + 14]));
  return two[0] + two[1];
}

// Totals over entries 0 to DIM - 1 of what `terms` writes for each, N numbers of every row, added up as `Sum` does it.
template <int DIM, int N, class F>
inline __attribute__((always_inline)) void totals(V* total, F terms) {
  V lanes[N][16];
  for (int i = 0; i < 16; i += 4) {
    V part[4][N] = {}, term[N];
    for (int d = i; d < DIM; d += 16)
      for (int j = 0; j < 4; j++) {
        terms(d + j, term);
        for (int n = 0; n < N; n++) part[j][n] += term[n];
      }
    for (int j = 0; j < 4; j++)
      for (int n = 0; n < N; n++) lanes[n][i + j] = part[j][n];
  }
  for (int n = 0; n < N; n++) total[n] = in_halves(lanes[n]);
}

// Cells of a table of 2^BITS values by bisection. An index is kept negative, for a comparison gives -1; a lookup ignores its higher bits.
template <bool UP, int BITS>
struct Cells {
  V bounds[BITS], even, odd;

  Cells(const float* boundaries, const float* words) {
    for (int i = 0; i < W; i++) {
      for (int step = 0; step < BITS; step++) {
        const int cell = -i & ((1 << step) - 1);
        bounds[step][i] = boundaries[((2 * cell + 1) << (BITS - 1 - step)) - 1];
      }
      const int pair = -i & ((1 << (BITS - 1)) - 1);
      even[i] = words[2 * pair], odd[i] = words[2 * pair + 1];
    }
  }

  // Of 2^STEP values: up to four are beside each other in half a register.
  template <int STEP>
  static V pick(V table, VI at) {
    if constexpr (STEP == 0) return table;
    if constexpr (STEP <= 2) return (V)_mm256_permutevar_ps((__m256)table, (__m256i)at);
    return (V)_mm256_permutevar8x32_ps((__m256)table, (__m256i)at);
  }

  // What is below zero of a value's cell, and its word.
  template <int STEP = 0>
  VI find(V value, VI at, V& word) const {
    const V bound = pick<STEP>(bounds[STEP], at);
    const VI above = UP ? value >= bound : value > bound;
    if constexpr (STEP + 1 < BITS) return find<STEP + 1>(value, at + at + above, word);
    word = above ? pick<STEP>(odd, at) : pick<STEP>(even, at);
    return at + at + above;
  }
};

// Codes of W rows and their words, entry by entry.
template <bool UP, int BITS, int DIM>
void cells_of(const float* y, const float* boundaries, const float* words, uint8_t* codes, int64_t row, float* q) {
  constexpr int COUNT = DIM * BITS / 32, PADDED = (COUNT + W - 1) / W * W;  // words of a row
  const Cells<UP, BITS> cells(boundaries, words);
  alignas(64) uint32_t beside[PADDED * W], rows[W * PADDED];
  for (int k = COUNT; k < PADDED; k++) store_words(beside + k * W, Words{});
  for (int d = 0; d < DIM; d += 32) {
    Words eight[4];  // of eight codes each
    for (int i = 0; i < 4; i++) {
      VI below{};
      for (int j = 7; j >= 0; j--) {
        const int at = (d + 8 * i + j) * W;
        V word;
        below = (below << BITS) - cells.find(load(y + at), VI{}, word);
        store(q + at, word);
      }
      eight[i] = (Words)below;
    }
    // Neighbouring codes lie in 32 bits BITS times, from where those before them end.
    for (int i = 0; i < BITS; i++) {
      Words packed{};
      for (int j = 0; j < 4; j++) {
        const int bit = 8 * BITS * j - 32 * i;
        if (bit > -8 * BITS && bit < 32) packed |= bit < 0 ? eight[j] >> -bit : eight[j] << bit;
      }
      store_words(beside + (d / 32 * BITS + i) * W, packed);
    }
  }
  for (int k = 0; k < PADDED; k += W) turn_block(reinterpret_cast<const uint8_t*>(beside + k * W), 4 * W, W, rows + k, PADDED);
  for (int t = 0; t < W; t++) memcpy(codes + t * row, rows + t * PADDED, 4 * COUNT);
}

template <int DIM>
void stage_of(const RotatedCoding& c, int s, const float* y, uint8_t* codes, int64_t row, float* q) {
  const auto& stage = c.stage[s];
  with_bits(stage.bits, [&](auto bits) {
    constexpr int BITS = decltype(bits)::value;
    if constexpr (BITS <= 4) {
      if (c.ties_up) return cells_of<true, BITS, DIM>(y, stage.boundaries, stage.codewords, codes, row, q);
      cells_of<false, BITS, DIM>(y, stage.boundaries, stage.codewords, codes, row, q);
    }
  });
}

inline bool codes_abreast(const RotatedCoding& c) { return !c.steps && c.stage[0].bits <= 4 && (c.stages == 1 || c.stage[1].bits <= 4); }

// A row that is read soon, and its angles: they are too far from what is read before them to be foreseen.
inline void ask_for_row(const Input& in, int head, int at) {
  if (at >= in.count) return;
  const uint8_t* row = in.data + head * in.head + at * in.row;
  for (int i = 0; i < in.dim * (in.type == Type::FLOAT32 ? 4 : 2); i += 64) __builtin_prefetch(row + i);
  if (!in.undo.pages) return;
  const float* angles = angles_of(in.undo, at);
  for (int i = 0; i < 2 * in.undo.half; i += 16) __builtin_prefetch(angles + i);
}

// Rows `from` to from + W of a head, as `code_rows` codes them.
template <int DIM>
bool code_abreast(const RotatedCoding& c, const float* mean, const float* signs, int head, int from, Loss& loss) {
  alignas(64) float rows[W * DIM], x[DIM * W], y[DIM * W], q[DIM * W];
  for (int t = 0; t < W; t++) read_row(c.input, head, from + t, DIM, rows + t * DIM);
  // Those that follow are asked for a quarter at a time while these are worked on.
  const auto ask = [&](int quarter) {
    for (int t = 0; t < W / 4; t++) ask_for_row(c.input, head, from + W + W / 4 * quarter + t);
  };
  for (int d = 0; d < DIM; d += W)
    turn_block(reinterpret_cast<const uint8_t*>(rows + d), 4 * DIM, W, reinterpret_cast<uint32_t*>(x + d * W), W);
  ask(0);
  // Magnitudes are compared as integers: a NaN is beyond them all.
  VI most{}, most_apart{};
  const auto further = [](VI& top, V value) {
    const VI size = (VI)value & 0x7fffffff;
    top = size > top ? size : top;
  };
  VI nearer{};
  V energy[2];
  if (c.mean) {
    totals<DIM, 2>(energy, [&](int d, V* term) {
      const V value = load(x + d * W), apart = value - mean[d];
      further(most, value), further(most_apart, apart);
      term[0] = value * value, term[1] = apart * apart;
    });
    nearer = energy[1] < energy[0];
  } else {
    for (int d = 0; d < DIM; d++) further(most, load(x + d * W));
  }
  const VI unsound = ~((V)most <= LARGEST);
  if (_mm256_movemask_ps((__m256)unsound)) return false;
  const V largest = (V)(nearer ? most_apart : most);
  const VI coded = largest >= SMALLEST;
  const V over = coded ? 1 / largest : V{};
  ask(1);
  V squares[16];
  for (int d = 0; d < DIM; d += 8) {
    V v[8];
    for (int i = 0; i < 8; i++) {
      const V taken = (V)((VI)all(mean[d + i]) & nearer), value = (load(x + (d + i) * W) - taken) * over;
      squares[d % 16 + i] = d < 16 ? value * value : squares[d % 16 + i] + value * value;
      v[i] = value * signs[d + i];
    }
    combine<8>(v);
    for (int i = 0; i < 8; i++) store(y + (d + i) * W, v[i]);
  }
  const V sum = in_halves(squares), unit = square_root(sum / float(DIM)), by_unit = coded ? 1 / unit : V{};
  const V root = all(1 / __builtin_sqrtf(float(DIM)));
  for (int d = 0; d < 8; d++) {
    V v[DIM / 8];
    for (int i = 0; i < DIM / 8; i++) v[i] = load(y + (8 * i + d) * W);
    combine<DIM / 8>(v);
    for (int i = 0; i < DIM / 8; i++) store(y + (8 * i + d) * W, v[i] * root * by_unit);
  }
  ask(2);
  const int64_t first = int64_t(head) * c.input.count + from;
  for (int s = 0; s < c.stages; s++) {
    const int bytes = DIM * c.stage[s].bits / 8;
    stage_of<DIM>(c, s, s ? x : y, c.stage[s].codes + first * bytes, bytes, s ? x : q);
    if (s == 0 && c.stages == 2)
      for (int i = 0; i < DIM * W; i += W) store(x + i, load(y + i) - load(q + i));
    else if (s == 1)
      for (int i = 0; i < DIM * W; i += W) store(q + i, load(q + i) + load(x + i));
  }
  ask(3);
  V correction = all(1);
  if (c.kind != Scale::NORM) {
    V dots[2];  // <y, q>, and <q, q> or <y, y>
    const float* own = c.kind == Scale::LS ? q : y;
    totals<DIM, 2>(dots, [&](int d, V* term) {
      const V other = load(own + d * W);
      term[0] = load(y + d * W) * load(q + d * W), term[1] = other * other;
    });
    const V top = c.kind == Scale::LS ? dots[0] : dots[1], under = c.kind == Scale::LS ? dots[1] : dots[0];
    correction = under > 0 ? top / under : correction;
  }
  const V scale = coded ? largest * unit * correction : V{};
  V factor{};
  for (int t = 0; t < W; t++) {
    const uint16_t stored = to_bfloat(scale[t]);
    c.scale[first + t] = c.mean && !nearer[t] ? to_bfloat(-scale[t]) : stored;
    if (coded[t]) factor[t] = float(bfloat(stored) / (double(largest[t]) * unit[t]));
  }
  V lost;
  totals<DIM, 1>(&lost, [&](int d, V* term) {
    const V apart = load(y + d * W) - load(q + d * W) * factor;
    *term = apart * apart;
  });
  for (int t = 0; t < W; t++) {
    const double size = double(largest[t]) * unit[t];
    if (coded[t]) loss.error += double(lost[t]) * size * size;
    loss.energy += c.mean ? energy_of(rows + t * DIM, DIM, energy[0][t]) : double(sum[t]) * largest[t] * largest[t];
  }
  return true;
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
