// Keys to codes of their components, values to codes of what those do not predict, and back, at one SIMD level; compiled once for each.
//
//     y = (k - mean) forward,   codes of y                                    encode_keys
//     p = v_mean + mix y~,      codes and size of R (v - p)                   encode_values
//                               v^ = p + size R^T points                      decode_values
//
// Tokens are in the lanes, 32 of them at a time: a lane's operations are the same whatever stands beside it. Sums are taken in the order of
// their terms, and no product is contracted with a sum (CMakeLists.txt): every level and every number of threads gives the same bytes.
#include "calibrated.hpp"

#include "components.hpp"
#include "floats.hpp"
#include "lookup.hpp"
#include "narrow.hpp"
#include "simd.hpp"
#include "sylvester.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int T = TOGETHER;            // tokens
constexpr float LARGEST = 1e36f;       // beyond it a float32 sum over a row could overflow
constexpr float SMALLEST = 0x1p-120f;  // below it a row counts as zero
constexpr float FAR = 1e18f;           // from the mean, at most
constexpr float WILD = 64;             // standard deviations that a predicting component moves at most

inline V absolute(V x) { return x < 0 ? -x : x; }
inline V within(V x, float limit) {
  x = x > all(limit) ? all(limit) : x;
  return x < all(-limit) ? all(-limit) : x;
}
inline V over(V size) { return size >= all(SMALLEST) ? 1 / size : V{}; }
inline int in_panels(int rows) { return (rows + PANEL - 1) / PANEL; }
inline int widened(int dim) { return padded(dim) + 16; }  // rows of a tile, with room for what is written past them

// out[r][t] += sum over i of panel[i][r] x[i][t], in the order of i: of R rows and N vectors of tokens.
template <int R, int N>
inline void some_products(const float* panel, const float* x, int size, float* out) {
  V sum[R][N];
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) sum[r][n] = load(out + r * T + n * W);
  for (int i = 0; i < size; i++, panel += PANEL, x += T) {
    V y[N];
    for (int n = 0; n < N; n++) y[n] = load(x + n * W);
    for (int r = 0; r < R; r++) {
      const V weight = all(panel[r]);
      for (int n = 0; n < N; n++) sum[r][n] += weight * y[n];
    }
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) store(out + r * T + n * W, sum[r][n]);
}

// Of a whole panel and 32 tokens, by as many sums as there are registers for.
inline void product(const float* panel, const float* x, int size, float* out) {
#if defined(__AVX512F__)
  some_products<8, 2>(panel, x, size, out);
#elif defined(KVTOOL_USE_NEON)
  for (int t = 0; t < T; t += 4 * W)
    for (int r = 0; r < PANEL; r += 4) some_products<4, 4>(panel + r, x + t, size, out + r * T + t);
#else
  for (int t = 0; t < T; t += 2 * W)
    for (int r = 0; r < PANEL; r += 4) some_products<4, 2>(panel + r, x + t, size, out + r * T + t);
#endif
}

// Rows of floats turned: entry i of token t at x[i][t], zeros for the tokens from `count` on. Whether all of them are finite, and fit.
inline bool turned(const Rows& rows, int head, int from, int count, float* tile, float* x) {
  const int width = padded(rows.dim);
  decode_floats(rows, head, from, count, tile);
  memset(tile + count * width, 0, sizeof(float) * (T - count) * width);
  VI bad{};
  for (int i = 0; i < count * width; i += W) {
    const VI fits = absolute(load(tile + i)) <= all(LARGEST);  // a NaN fails any comparison
    bad |= ~fits;
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(tile);
  turn_rows(bytes, bytes + 4 * T * width, 4 * width, 4 * rows.dim, T, reinterpret_cast<uint32_t*>(x), T);
  int any = 0;
  for (int i = 0; i < W; i++) any |= bad[i];
  return !any;
}

// y of a head's rows x, in place of what is in y: whole panels are written.
inline void project(const Projection& p, int head, float* x, float* y) {
  const float* mean = p.mean + int64_t(head) * p.dim;
  for (int i = 0; i < p.dim; i++)
    for (int t = 0; t < T; t += W) store(x + i * T + t, within(load(x + i * T + t) - mean[i], FAR));
  const int panels = p.panels[head + 1] - p.panels[head];
  const float* panel = p.forward + int64_t(p.panels[head]) * p.dim * PANEL;
  memset(y, 0, sizeof(float) * T * PANEL * panels);
  for (int i = 0; i < panels; i++, panel += int64_t(p.dim) * PANEL) product(panel, x, p.dim, y + i * PANEL * T);
}

// --- codes

constexpr int step_at(int step) { return step <= 4 ? 16 * step : 48 + (1 << step); }

// How many boundaries lie below each value, found by halves; NaN is above all.
template <int BITS, int STEP = 0>
inline VI cell(const float* boundaries, V y, VI at = VI{}) {
  if constexpr (STEP == BITS) {
    return at;
  } else {
    V bound;
    if constexpr (STEP == 0)
      bound = all(boundaries[0]);
    else
      bound = Lookup<STEP>(boundaries + step_at(STEP)).of((Words)at);
    const VI below = y <= bound;  // all bits set where true
    return cell<BITS, STEP + 1>(boundaries, y, 2 * at + 1 + below);
  }
}

template <int BITS>
void code(const float* boundaries, const float* y, uint8_t* codes) {
  for (int t = 0; t < T; t += W) store_bytes(codes + t, cell<BITS>(boundaries, load(y + t)));
}

// Codes, one a byte, and their points' products with y: sums of y y and of y point.
template <int BITS>
void code_and_weigh(const float* boundaries, const float* points, const float* y, int count, uint8_t* codes, float* power, float* by_point) {
  const Lookup<BITS> lookup(points);
  for (int t = 0; t < T; t += W) {
    V squares{}, products{};
    for (int i = 0; i < count; i++) {
      const V value = load(y + i * T + t);
      const VI at = cell<BITS>(boundaries, value);
      store_bytes(codes + i * T + t, at);
      squares += value * value, products += value * lookup.of((Words)at);
    }
    store(power + t, squares), store(by_point + t, products);
  }
}

// 32 codes of b bits, one a byte, to neighbouring ones.
template <int BITS>
void pack(const uint8_t* codes, uint8_t* out) {
  for (int i = 0; i < T; i += 8, out += BITS) {
    uint64_t word;
    memcpy(&word, codes + i, 8);
    // Lanes of 8, 16 and 32 bits are merged in pairs.
    word = (word & 0x00ff00ff00ff00ffull) | (word >> 8 & 0x00ff00ff00ff00ffull) << BITS;
    word = (word & 0x0000ffff0000ffffull) | (word >> 16 & 0x0000ffff0000ffffull) << 2 * BITS;
    word = (word & 0x00000000ffffffffull) | (word >> 32) << 4 * BITS;
    memcpy(out, &word, BITS);
  }
}

bool encode_keys(const KeyCoding& c, int head, int from, int count, float* scratch) {
  const int dim = c.to.dim, first = c.to.first[head], last = c.to.first[head + 1];
  float *tile = scratch, *x = tile + T * padded(dim), *y = x + widened(dim) * T;
  uint8_t codes[T];
  for (int t = 0; t < count; t += T) {
    const int some = count - t < T ? count - t : T;
    if (!turned(c.x, head, from + t, some, tile, x)) return false;
    project(c.to, head, x, y);
    uint8_t* out = c.codes + (from + t) / T * c.cells.block;
    for (int i = first; i < last; i++) {
      with_bits(c.cells.bits[i], [&](auto bits) {
        constexpr int BITS = decltype(bits)::value;
        code<BITS>(c.cells.boundaries + c.cells.table[i], y + (i - first) * T, codes);
        memset(codes + some, 0, T - some);
        pack<BITS>(codes, out + c.cells.place[i]);
      });
    }
  }
  return true;
}

// --- values

// Sylvester's matrix of a power of two times n rows of tokens, in place.
void sylvester_rows(float* x, int n) {
  int step = 1;
  auto turn = [&](auto size) {
    constexpr int N = decltype(size)::value;
    for (int i = 0; i < n; i += N * step)
      for (int j = i; j < i + step; j++)
        for (int t = 0; t < T; t += W) {
          V v[N];
          for (int k = 0; k < N; k++) v[k] = load(x + (j + k * step) * T + t);
          combine<N>(v);
          for (int k = 0; k < N; k++) store(x + (j + k * step) * T + t, v[k]);
        }
    step *= N;
  };
  while (8 * step <= n) turn(Number<8>{});
  if (4 * step <= n) turn(Number<4>{});
  if (2 * step <= n) turn(Number<2>{});
}

// sqrt(D) T x in place, D = odd 2^k; `rest` is as large as x.
void transform_rows(const ValueCoding& c, float* x, float* rest) {
  const int dim = c.to.dim, power = dim / c.odd;
  for (int i = 0; i < c.odd; i++) sylvester_rows(x + i * power * T, power);
  if (c.odd == 1) return;
  memcpy(rest, x, sizeof(float) * dim * T);
  for (int i = 0; i < c.odd; i++)
    for (int j = 0; j < power; j++)
      for (int t = 0; t < T; t += W) {
        V sum{};
        for (int l = 0; l < c.odd; l++) sum += load(rest + (l * power + j) * T + t) * c.hartley[i * c.odd + l];
        store(x + (i * power + j) * T + t, sum);
      }
}

// The components of all heads' keys that values are predicted from.
void predicting(const ValueCoding& c, int from, int count, float* tile, float* x, float* y) {
  const int* first = c.to.first;
  for (int h = 0; h < c.to.heads; h++) {
    turned(c.keys, h, from, count, tile, x);
    project(c.to, h, x, y + first[h] * T);  // what is written past them is the next head's
    for (int i = first[h] * T; i < first[h + 1] * T; i += W) store(y + i, within(load(y + i), WILD));
  }
}

// Predicted values of a head.
void predict(const ValueCoding& c, int head, const float* y, float* p) {
  const int *first = c.to.first, dim = c.to.dim, heads = c.to.heads, panels = in_panels(dim);
  const float *mean = c.mean + int64_t(head) * dim, *panel = c.mix + int64_t(head) * first[heads] * panels * PANEL;
  for (int i = 0; i < panels * PANEL; i++)
    for (int t = 0; t < T; t += W) store(p + i * T + t, all(i < dim ? mean[i] : 0));
  // A head's components at a time, which stay in the nearest cache beside the sums.
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < panels; i++) {
      const int size = first[h + 1] - first[h];
      product(panel, y + first[h] * T, size, p + i * PANEL * T);
      panel += int64_t(size) * PANEL;
    }
}

struct Room {
  float *tile, *x, *p, *y, *codes;
  Room(const Projection& to, float* scratch)
      : tile(scratch), x(tile + T * padded(to.dim)), p(x + widened(to.dim) * T), y(p + widened(to.dim) * T),
        codes(y + (int64_t(to.first[to.heads]) + PANEL) * T) {}
};

bool encode_values(const ValueCoding& c, int from, int count, float* scratch) {
  const int dim = c.to.dim;
  const Room room(c.to, scratch);
  float *x = room.x, *p = room.p;
  auto* codes = reinterpret_cast<uint8_t*>(room.codes);
  const float norm = 1 / __builtin_sqrtf(float(dim));
  alignas(64) float power[T], by_point[T], unit[T], size[T];
  for (int t = 0; t < count; t += T) {
    const int some = count - t < T ? count - t : T;
    predicting(c, from + t, some, room.tile, x, room.y);
    uint8_t* out = c.codes + (from + t) / T * c.cells.block;
    for (int h = 0; h < c.to.heads; h++) {
      predict(c, h, room.y, p);
      if (!turned(c.x, h, from + t, some, room.tile, x)) return false;
      for (int s = 0; s < T; s += W) {
        V largest{};
        for (int i = 0; i < dim; i++) {
          const V left = load(x + i * T + s) - load(p + i * T + s), far = absolute(left);
          store(x + i * T + s, left), largest = far > largest ? far : largest;
        }
        const V inverse = over(largest) * norm;
        for (int i = 0; i < dim; i++) store(x + i * T + s, load(x + i * T + s) * inverse * c.signs[i]);
        store(unit + s, largest);
      }
      transform_rows(c, x, p);
      for (int s = 0; s < T; s += W) {
        V sum{};
        for (int i = 0; i < dim; i++) sum += load(x + i * T + s) * load(x + i * T + s);
        sum = sum * (1 / float(dim));
        V length;
        for (int i = 0; i < W; i++) length[i] = __builtin_sqrtf(sum[i]);
        const V inverse = over(length);
        for (int i = 0; i < dim; i++) store(x + i * T + s, load(x + i * T + s) * inverse);
        store(unit + s, load(unit + s) * length);
      }
      const int at = h * dim;  // values of all heads are coded
      with_bits(c.cells.bits[at], [&](auto bits) {
        constexpr int BITS = decltype(bits)::value;
        code_and_weigh<BITS>(c.cells.boundaries + c.cells.table[at], c.points + c.point[h], x, dim, codes, power, by_point);
        bool whole = some == T;
        for (int s = 0; s < some; s++) {
          size[s] = unit[s] * (power[s] / (by_point[s] > 1e-30f ? by_point[s] : 1e-30f));
          whole &= size[s] >= SMALLEST;
        }
        for (int s = 0; !whole && s < T; s++)
          for (int i = 0; (s >= some || !(size[s] >= SMALLEST)) && i < dim; i++) codes[i * T + s] = 0;
        for (int i = 0; i < dim; i++) pack<BITS>(codes + i * T, out + c.cells.place[at + i]);
      });
      memcpy(c.sizes + int64_t(h) * c.x.count + from + t, size, sizeof(float) * some);
    }
  }
  return true;
}

template <Type TYPE>
void decode_typed(const ValueCoding& c, int from, int count, float* scratch) {
  using Stored = typename Values<TYPE>::Stored;
  const int dim = c.to.dim, width = padded(dim);
  const Room room(c.to, scratch);
  float *x = room.x, *p = room.p, size[2 * T];
  const float norm = 1 / __builtin_sqrtf(float(dim));
  for (int t = 0; t < count; t += T) {
    const int some = count - t < T ? count - t : T;
    predicting(c, from + t, some, room.tile, x, room.y);
    for (int h = 0; h < c.to.heads; h++) {
      const int* first = c.components.first + h;
      decode_components(c.components, first[0], first[1], from + t, some, x, T);
      transform_rows(c, x, p);
      predict(c, h, room.y, p);
      decode_component(c.scales, h, from + t, some, size);
      for (int i = 0; i < dim; i++) {
        const float factor = c.signs[i] * norm;
        for (int s = 0; s < T; s += W) store(p + i * T + s, load(p + i * T + s) + load(x + i * T + s) * (load(size + s) * factor));
      }
      const auto* bytes = reinterpret_cast<const uint8_t*>(p);
      turn_rows(bytes, bytes + 4 * T * dim, 4 * T, 4 * T, dim, reinterpret_cast<uint32_t*>(room.tile), width);
      Stored* out = reinterpret_cast<Stored*>(c.out) + (int64_t(h) * c.keys.count + from + t) * dim;
      for (int s = 0; s < some; s++) narrow<TYPE>(room.tile + s * width, dim, out + s * dim);
    }
  }
}

void decode_values(const ValueCoding& c, int from, int count, float* scratch) {
  if (c.type == Type::FLOAT16) return decode_typed<Type::FLOAT16>(c, from, count, scratch);
  if (c.type == Type::BFLOAT16) return decode_typed<Type::BFLOAT16>(c, from, count, scratch);
  decode_typed<Type::FLOAT32>(c, from, count, scratch);
}

size_t key_scratch(const Projection& to) {
  int most = 0;
  for (int h = 0; h < to.heads; h++) most = to.panels[h + 1] - to.panels[h] > most ? to.panels[h + 1] - to.panels[h] : most;
  return size_t(T) * (padded(to.dim) + widened(to.dim) + most * PANEL);
}

size_t value_scratch(const Projection& to) {
  return size_t(T) * (padded(to.dim) + 2 * widened(to.dim) + to.first[to.heads] + PANEL + widened(to.dim) / 4);
}

}  // namespace
}  // namespace KVTOOL_INSIDE

#define KVTOOL_CALIBRATED_(x) x##_calibrated
#define KVTOOL_CALIBRATED(x) KVTOOL_CALIBRATED_(x)
extern const Calibrated KVTOOL_CALIBRATED(KVTOOL_LEVEL);
const Calibrated KVTOOL_CALIBRATED(KVTOOL_LEVEL) = {
    KVTOOL_INSIDE::key_scratch, KVTOOL_INSIDE::value_scratch, KVTOOL_INSIDE::encode_keys, KVTOOL_INSIDE::encode_values,
    KVTOOL_INSIDE::decode_values};

}  // namespace kvtool
