// Rows of floats to codes, each row read once, at one SIMD level; compiled once for each.
//
// Sums are taken in 16 lanes whatever the width of a vector, and no product is contracted with a sum (CMakeLists.txt): every level and
// every number of threads gives the same bytes.
#include "coding.hpp"
#include "problem.hpp"
#include "simd.hpp"
#include "sylvester.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr float LARGEST = 1e36f;         // beyond it a float32 sum over a row could overflow
constexpr float SMALLEST = 0x1p-120f;    // below it a row's values, or a group's step, count as zero
constexpr float ROUNDING = 12582912.0f;  // adding it rounds to an integer, halves to even
constexpr int LANES = 16 / W;

inline V absolute(V x) { return x < 0 ? -x : x; }
inline V larger(V a, V b) { return a > b ? a : b; }
inline V smaller(V a, V b) { return a < b ? a : b; }

inline uint16_t to_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The nearest bfloat16 not above x, or not below it.
inline uint16_t outward(float x, bool up) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const bool further = (bits & 0xffff) && (bits >> 31) == (up ? 0u : 1u);
  return uint16_t((bits >> 16) + further);
}

struct Sum {
  V lanes[LANES] = {};
  void add(int i, V x) { lanes[i / W % LANES] += x; }
  // Halves are added until one number is left: of 16, 8, 4 and 2.
  float total() const {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)lanes[0]), _mm512_extractf32x8_ps((__m512)lanes[0], 1));
#else
    const __m256 eight = _mm256_add_ps((__m256)lanes[0], (__m256)lanes[1]);
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    const V four = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
#endif
  }
};

// A row's rotary embedding undone, in half-split order.
void undo(const Input& in, const float* cos, float* x) {
  const int half = in.undo.half;
  const float* sin = cos + half;
  float *a = x + in.rope_first, *b = a + half;
  if (in.interleaved) {
    float pairs[MAX_DIM];
    memcpy(pairs, a, 2 * half * sizeof(float));
    for (int i = 0; i < half; i++) a[i] = pairs[2 * i], b[i] = pairs[2 * i + 1];
  }
  int i = 0;
  for (; i + W <= half; i += W) {
    const V u = load(a + i), v = load(b + i), c = load(cos + i), s = load(sin + i);
    store(a + i, (u * c + v * s) * in.ratio), store(b + i, (v * c - u * s) * in.ratio);
  }
  for (; i < half; i++) {
    const float u = a[i], v = b[i];
    a[i] = (u * cos[i] + v * sin[i]) * in.ratio, b[i] = (v * cos[i] - u * sin[i]) * in.ratio;
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
#define KVTOOL_UNDO_AT_ONCE
// A row whose rotated entries are half-split and whole vectors, undone as it is read: `read_row` and `undo` in one pass.
template <class F>
inline __attribute__((always_inline)) void read_undone(const Input& in, const float* cos, int dim, float* out, F vector) {
  const int half = in.undo.half, first = in.rope_first;
  const float* sin = cos + half;
  for (int i = 0; i < first; i += W) store(out + i, vector(i));
  for (int i = 0; i < half; i += W) {
    const V u = vector(first + i), v = vector(first + half + i), c = load(cos + i), s = load(sin + i);
    store(out + first + i, (u * c + v * s) * in.ratio), store(out + first + half + i, (v * c - u * s) * in.ratio);
  }
  for (int i = first + 2 * half; i < dim; i += W) store(out + i, vector(i));
}
#endif

// A row of floats before RoPE, padded with zeros to a multiple of 16.
inline __attribute__((always_inline)) void read_row(const Input& in, int head, int64_t at, int dim, float* out) {
  const uint8_t* row = in.data + head * in.head + at * in.row;
  const float* floats = reinterpret_cast<const float*>(row);
  const uint16_t* words = reinterpret_cast<const uint16_t*>(row);
  const int whole = dim / W * W, width = padded(dim);
#if defined(KVTOOL_UNDO_AT_ONCE)
  if (in.undo.pages && !in.interleaved && in.rope_first % W == 0 && in.undo.half % W == 0 && dim % W == 0) {
    const float* cos = angles_of(in.undo, at);
    if (in.type == Type::FLOAT32) read_undone(in, cos, dim, out, [=](int i) { return load(floats + i); });
    else if (in.type == Type::FLOAT16) read_undone(in, cos, dim, out, [=](int i) { return load_half(words + i); });
    else read_undone(in, cos, dim, out, [=](int i) { return load_bfloat(words + i); });
    for (int i = dim; i < width; i++) out[i] = 0;
    return;
  }
#endif
  int i = 0;
  if (in.type == Type::FLOAT32) {
    for (; i < whole; i += W) store(out + i, load(floats + i));
    for (; i < dim; i++) out[i] = floats[i];
  } else if (in.type == Type::FLOAT16) {
    for (; i < whole; i += W) store(out + i, load_half(words + i));
    for (; i < dim; i++) out[i] = half(words[i]);
  } else {
    for (; i < whole; i += W) store(out + i, load_bfloat(words + i));
    for (; i < dim; i++) out[i] = bfloat(words[i]);
  }
  for (; i < width; i++) out[i] = 0;
  if (in.undo.pages) undo(in, angles_of(in.undo, int(at)), out);
}

inline __attribute__((always_inline)) float largest_of(const float* x, int width) {
  V top{};
  for (int i = 0; i < width; i += W) top = larger(absolute(load(x + i)), top);
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)top);
#endif
  float largest = 0;
  for (int i = 0; i < W; i++) largest = top[i] > largest ? top[i] : largest;
  return largest;
}

inline __attribute__((always_inline)) bool sound(const float* x, int width) {
  VI bad{};
  for (int i = 0; i < width; i += W) {
    const VI fits = absolute(load(x + i)) <= LARGEST;  // a NaN fails any comparison
    bad |= ~fits;
  }
#if defined(__AVX512F__)
  return !_mm512_test_epi32_mask((__m512i)bad, (__m512i)bad);
#endif
  int any = 0;
  for (int i = 0; i < W; i++) any |= bad[i];
  return !any;
}

// Codes of a row, one a byte, to neighbouring codes of b bits; the bytes past dim are 0.
void pack(const uint8_t* codes, int dim, int bits, uint8_t* out) {
  const int bytes = (dim * bits + 7) / 8;
  if (bits == 8) {
    memcpy(out, codes, dim);
    return;
  }
  int i = 0, at = 0;
#if defined(__AVX2__)
  for (; bits == 4 && i + 32 <= dim; i += 32, at += 16) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i*)(codes + i)), _mm256_set1_epi16(0x1001));
    _mm_storeu_si128((__m128i*)(out + at), _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  }
#endif
  codes += i, dim -= i, out += at;
  uint8_t whole[MAX_DIM + 16];
  for (int i = 0, at = 0; i < dim; i += 8, at += bits) {
    uint64_t word;
    memcpy(&word, codes + i, 8);
    // Lanes of 8, 16 and 32 bits are merged in pairs.
    word = (word & 0x00ff00ff00ff00ffull) | (word >> 8 & 0x00ff00ff00ff00ffull) << bits;
    word = (word & 0x0000ffff0000ffffull) | (word >> 16 & 0x0000ffff0000ffffull) << 2 * bits;
    word = (word & 0x00000000ffffffffull) | (word >> 32) << 4 * bits;
    memcpy(whole + at, &word, 8);
  }
  memcpy(out, whole, bytes - at);
}

// Index of each value's cell (how many boundaries lie below it) and its codeword, of tables that fit into registers.
template <bool UP, int BITS>
inline __attribute__((always_inline)) void nearest_of(const float* y, int width, const float* boundaries, const float* words, uint8_t* codes, float* q) {
  const Table16 of_cell(words);
#if defined(__AVX512F__)
  const Table16 bounds(boundaries);
#endif
  for (int i = 0; i < width; i += W) {
    const V value = load(y + i);
    VI index{};
#if defined(__AVX512F__)
    for (int step = 1 << BITS >> 1; step; step >>= 1) {
      const V bound = bounds(index + (step - 1));
      const VI above = UP ? value >= bound : value > bound;  // all bits set where true
      index += above & step;
    }
#else
    for (int b = 0; b < (1 << BITS) - 1; b++) {
      const VI above = UP ? value >= boundaries[b] : value > boundaries[b];
      index -= above;
    }
#endif
    store_bytes(codes + i, index), store(q + i, of_cell(index));
  }
}

template <bool UP>
inline __attribute__((always_inline)) void nearest(const float* y, int width, int bits, const float* boundaries, const float* words, uint8_t* codes, float* q) {
  switch (bits) {
    case 1: return nearest_of<UP, 1>(y, width, boundaries, words, codes, q);
    case 2: return nearest_of<UP, 2>(y, width, boundaries, words, codes, q);
    case 3: return nearest_of<UP, 3>(y, width, boundaries, words, codes, q);
    case 4: return nearest_of<UP, 4>(y, width, boundaries, words, codes, q);
  }
  for (int i = 0; i < width; i++) {
    int at = 0;
    for (int step = 1 << bits >> 1; step; step >>= 1) {
      const float boundary = boundaries[at + step - 1];
      at += (UP ? y[i] >= boundary : y[i] > boundary) ? step : 0;
    }
    codes[i] = uint8_t(at), q[i] = words[at];
  }
}

inline __attribute__((always_inline)) float dot(const float* a, const float* b, int width) {
  Sum sum;
  for (int i = 0; i < width; i += W) sum.add(i, load(a + i) * load(b + i));
  return sum.total();
}

// u of each value, the nearest point of the grid 2 u - (levels - 1) to t y, upwards where two are.
void grid_codes(const float* y, int width, float t, int levels, float* u) {
  const V half_t = all(t / 2), middle = all(float(levels) / 2), top = all(float(levels - 1));
  for (int i = 0; i < width; i += W) {
    V x = smaller(larger(load(y + i) * half_t + middle, V{}), top + 1);  // in a range where ROUNDING works
    V down = (x + ROUNDING) - ROUNDING;
    down = down > x ? down - 1 : down;
    store(u + i, smaller(down, top));
  }
}

struct Fit {
  float cosine, slope;
};

// <y, q>^2 / <q, q> of a row's codes at t, and the t whose grid fits those codes best.
Fit fit(const float* y, int dim, int width, float t, int levels, float* q) {
  grid_codes(y, width, t, levels, q);
  const V top = all(float(levels - 1));
  for (int i = 0; i < width; i += W) store(q + i, load(q + i) * 2 - top);
  for (int i = dim; i < width; i++) q[i] = 0;
  const float yq = dot(y, q, width), qq = dot(q, q, width);
  return {yq * yq / qq, yq > 0 ? qq / yq : t};
}

float best_grid(const RotatedCoding& c, const float* y, int dim, int width, int levels) {
  float q[MAX_DIM + 16];
  const float largest = largest_of(y, width), fitting = float(levels - 1) / (largest > 0 ? largest : 1);
  float best = 0, t = 0;
  for (int i = 0; i < c.candidates; i++) {
    const float candidate = fitting / c.steps[i];
    const float cosine = fit(y, dim, width, candidate, levels, q).cosine;
    if (i == 0 || cosine > best) best = cosine, t = candidate;
  }
  const float slope = fit(y, dim, width, t, levels, q).slope;
  return fit(y, dim, width, slope, levels, q).cosine > best ? slope : t;
}

// Sum of squares, of rows whose float32 sum overflowed too.
double energy_of(const float* x, int width, float sum) {
  if (sum <= LARGEST) return sum;
  double total = 0;
  for (int i = 0; i < width; i++) total += double(x[i]) * x[i];
  return total;
}

// Rows whose steps are taken side by side: each waits for sums over a row, during which those of the other rows go on.
constexpr int ABREAST = 4;

template <int DIM>
struct Row {
  static constexpr int WIDTH = (DIM ? DIM : MAX_DIM) + 16;
  alignas(64) float x[WIDTH], y[WIDTH], q[WIDTH], more[WIDTH];
  bool nearer, coded;
  float largest, unit, scale;
};

// ROWS rows from `from` on. DIM is c.input.dim, for loops that are unrolled, or 0 for any.
template <int DIM, int ROWS>
bool code_rows(const RotatedCoding& c, const float* mean, const float* signs, int head, int from, Row<DIM>* rows, Loss& loss) {
  const int dim = DIM ? DIM : c.input.dim, width = padded(dim);
  const V root = all(1 / __builtin_sqrtf(float(dim)));
  alignas(64) uint8_t codes[MAX_DIM + 16];
  bool fine = true;
  for (int r = 0; r < ROWS; r++) {
    read_row(c.input, head, from + r, dim, rows[r].x);
    fine &= sound(rows[r].x, width);
  }
  if (!fine) return false;
  for (int r = 0; r < ROWS; r++) {
    auto& [x, y, q, more, nearer, coded, largest, unit, scale] = rows[r];
    nearer = false;
    if (!c.mean) continue;
    Sum plain, centred;
    for (int i = 0; i < width; i += W) {
      const V value = load(x + i), apart = value - load(mean + i);
      store(y + i, apart);
      plain.add(i, value * value), centred.add(i, apart * apart);
    }
    const float energy = plain.total();
    nearer = centred.total() < energy;
    loss.energy += energy_of(x, width, energy);
    // No branch, for it would be guessed wrong every other row where the mean is small.
    const VI taken = VI{} - int(nearer);
    for (int i = 0; i < width; i += W) store(x + i, taken ? load(y + i) : load(x + i));
  }
  for (int r = 0; r < ROWS; r++) {
    auto& [x, y, q, more, nearer, coded, largest, unit, scale] = rows[r];
    largest = largest_of(x, width);
    coded = largest >= SMALLEST;
    const V over = all(coded ? 1 / largest : 0);
    Sum squares;
    for (int i = 0; i < width; i += W) {
      const V value = load(x + i) * over;
      store(x + i, value);
      squares.add(i, value * value);
    }
    const float sum = squares.total();
    unit = __builtin_sqrtf(sum / float(dim));
    if (!c.mean) loss.energy += double(sum) * largest * largest;
  }
  for (int r = 0; r < ROWS; r++) {
    auto& [x, y, q, more, nearer, coded, largest, unit, scale] = rows[r];
    for (int i = 0; i < width; i += W) store(y + i, load(x + i) * load(signs + i));
    if (c.odd == 1) {
      sylvester(y, dim);
      for (int i = 0; i < width; i += W) store(y + i, load(y + i) * root);
    } else {
      const int power = dim / c.odd;
      for (int i = 0; i < c.odd; i++) sylvester(y + i * power, power);
      for (int i = 0; i < dim; i++) x[i] = y[i] * root[0];
      for (int i = 0; i < c.odd; i++)
        for (int j = 0; j < power; j++) {
          float sum = 0;
          for (int l = 0; l < c.odd; l++) sum += c.hartley[i * c.odd + l] * x[l * power + j];
          y[i * power + j] = sum;
        }
    }
    const V by_unit = all(coded ? 1 / unit : 0);
    for (int i = 0; i < width; i += W) store(y + i, load(y + i) * by_unit);
    for (int i = dim; i < width; i++) y[i] = 0;
  }
  for (int s = 0; s < c.stages; s++) {
    const auto& stage = c.stage[s];
    const int bytes = (dim * stage.bits + 7) / 8;
    for (int r = 0; r < ROWS; r++) {
      auto& [x, y, q, more, nearer, coded, largest, unit, scale] = rows[r];
      const float* from_here = s ? more : y;
      float* found = s ? more : q;
      if (c.steps) {
        const int levels = 1 << stage.bits;
        grid_codes(y, width, best_grid(c, y, dim, width, levels), levels, q);
        for (int i = 0; i < width; i += W) {
          const VI code = __builtin_convertvector(load(q + i), VI);
          store_bytes(codes + i, code);
        }
        for (int i = 0; i < width; i++) q[i] = stage.codewords[codes[i]];
      } else if (c.ties_up) {
        nearest<true>(from_here, width, stage.bits, stage.boundaries, stage.codewords, codes, found);
      } else {
        nearest<false>(from_here, width, stage.bits, stage.boundaries, stage.codewords, codes, found);
      }
      for (int i = dim; i < width; i++) codes[i] = 0, found[i] = 0;
      if (s == 0 && c.stages == 2) {
        for (int i = 0; i < width; i += W) store(more + i, load(y + i) - load(q + i));
      } else if (s == 1) {
        for (int i = 0; i < width; i += W) store(q + i, load(q + i) + load(more + i));
      }
      pack(codes, dim, stage.bits, stage.codes + (int64_t(head) * c.input.count + from + r) * bytes);
    }
  }
  for (int r = 0; r < ROWS; r++) {
    auto& [x, y, q, more, nearer, coded, largest, unit, scale] = rows[r];
    float correction = 1;
    if (c.steps && c.kind == Scale::NORM) {
      correction = __builtin_sqrtf(dot(y, y, width) / dot(q, q, width));
    } else if (c.kind != Scale::NORM) {
      const float yq = dot(y, q, width), other = c.kind == Scale::LS ? dot(q, q, width) : dot(y, y, width);
      const float top = c.kind == Scale::LS ? yq : other, under = c.kind == Scale::LS ? other : yq;
      correction = under > 0 ? top / under : 1;
    }
    scale = coded ? largest * unit * correction : 0;
    c.scale[int64_t(head) * c.input.count + from + r] = to_bfloat(c.mean && !nearer ? -scale : scale);
  }
  for (int r = 0; r < ROWS; r++) {
    auto& [x, y, q, more, nearer, coded, largest, unit, scale] = rows[r];
    if (!coded) continue;
    // A rotation keeps lengths, and a mean that was taken off comes back: the error is that of the points.
    const double size = double(largest) * unit;
    const float factor = float(bfloat(to_bfloat(scale)) / size);
    Sum lost;
    for (int i = 0; i < width; i += W) {
      const V apart = load(y + i) - load(q + i) * factor;
      lost.add(i, apart * apart);
    }
    loss.error += double(lost.total()) * size * size;
  }
  return true;
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "abreast.hpp"
#endif

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

template <int DIM>
bool rotated_rows(const RotatedCoding& c, int head, int from, int count, Loss& loss) {
  constexpr int ROWS = DIM ? ABREAST : 1;
  const int dim = DIM ? DIM : c.input.dim, stop = from + count;
  alignas(64) float mean[MAX_DIM + 16] = {}, signs[MAX_DIM + 16] = {};
  Row<DIM> rows[ROWS];
  memcpy(signs, c.signs, dim * sizeof(float));
  for (int i = 0; c.mean && i < dim; i++) mean[i] = bfloat(c.mean[head * int64_t(dim) + i]);
  bool fine = true;
  int t = from;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (DIM > 0)
    if (codes_abreast(c))
      for (; t + W <= stop; t += W) fine &= code_abreast<DIM>(c, mean, signs, head, t, loss);
#endif
  for (; t + ROWS <= stop; t += ROWS) fine &= code_rows<DIM, ROWS>(c, mean, signs, head, t, rows, loss);
  for (; t < stop; t++) fine &= code_rows<DIM, 1>(c, mean, signs, head, t, rows, loss);
  return fine;
}

bool rotated(const RotatedCoding& c, int head, int from, int count, Loss& loss) {
  switch (c.odd == 1 ? c.input.dim : 0) {
    case 64: return rotated_rows<64>(c, head, from, count, loss);
    case 128: return rotated_rows<128>(c, head, from, count, loss);
  }
  return rotated_rows<0>(c, head, from, count, loss);
}

// Codes of a row whose steps and zeros are spread to every channel.
void affine_row(const AffineCoding& c, const float* x, const float* step, const float* zero, int64_t row, Loss& loss) {
  const int dim = c.input.dim, width = padded(dim);
  const V top = all(float((1 << c.bits) - 1));
  alignas(64) uint8_t codes[MAX_DIM + 16];
  alignas(64) float apart[MAX_DIM + 16];
  Sum error, energy;
  for (int i = 0; i < width; i += W) {
    const V by = load(step + i), one = all(1.0f);
    const VI some = by > 0;
    V code = (load(x + i) - load(zero + i)) / (some ? by : one);
    code = smaller(larger(code, V{}), top);
    code = (code + ROUNDING) - ROUNDING;
    code = some ? code : V{};
    store_bytes(codes + i, __builtin_convertvector(code, VI));
    const V value = load(x + i), far = value - (code * by + load(zero + i));
    store(apart + i, far), error.add(i, far * far), energy.add(i, value * value);
  }
  loss.error += energy_of(apart, dim, error.total()), loss.energy += energy_of(x, dim, energy.total());
  for (int i = dim; i < width; i++) codes[i] = 0;
  const int bytes = (dim * c.bits + 7) / 8;
  pack(codes, dim, c.bits, c.codes + row * bytes);
}

void step_of(float lowest, float highest, int levels, uint16_t& step, uint16_t& zero) {
  zero = outward(lowest, false);
  step = outward((highest - bfloat(zero)) / float(levels), true);
  if (!(bfloat(step) >= SMALLEST)) step = 0;
}

bool affine(const AffineCoding& c, int head, int from, int count, Loss& loss) {
  const int dim = c.input.dim, width = padded(dim), levels = (1 << c.bits) - 1;
  alignas(64) float x[MAX_DIM + 16], low[MAX_DIM + 16], high[MAX_DIM + 16], step[MAX_DIM + 16] = {}, zero[MAX_DIM + 16] = {};
  bool fine = true;
  if (c.by_token) {
    const int groups = (dim + c.group - 1) / c.group;
    for (int t = from; t < from + count; t++) {
      read_row(c.input, head, t, dim, x);
      fine &= sound(x, width);
      const int64_t row = int64_t(head) * c.input.count + t;
      for (int g = 0; g < groups; g++) {
        const int begin = g * c.group, end = begin + c.group < dim ? begin + c.group : dim;
        float lowest = x[begin], highest = x[begin];
        for (int i = begin; i < end; i++) lowest = x[i] < lowest ? x[i] : lowest, highest = x[i] > highest ? x[i] : highest;
        uint16_t &by = c.step[row * groups + g], &origin = c.zero[row * groups + g];
        step_of(lowest, highest, levels, by, origin);
        for (int i = begin; i < end; i++) step[i] = bfloat(by), zero[i] = bfloat(origin);
      }
      affine_row(c, x, step, zero, row, loss);
    }
    return fine;
  }
  const int64_t groups = (c.input.count + c.group - 1) / c.group;
  for (int start = from; start < from + count; start += c.group) {
    const int stop = start + c.group < from + count ? start + c.group : from + count;
    for (int t = start; t < stop; t++) {
      read_row(c.input, head, t, dim, x);
      fine &= sound(x, width);
      for (int i = 0; i < width; i += W) {
        const V value = load(x + i);
        store(low + i, t == start ? value : smaller(value, load(low + i)));
        store(high + i, t == start ? value : larger(value, load(high + i)));
      }
    }
    const int64_t at = (head * groups + start / c.group) * dim;
    for (int i = 0; i < dim; i++) {
      step_of(low[i], high[i], levels, c.step[at + i], c.zero[at + i]);
      step[i] = bfloat(c.step[at + i]), zero[i] = bfloat(c.zero[at + i]);
    }
    for (int t = start; t < stop; t++) {
      read_row(c.input, head, t, dim, x);
      affine_row(c, x, step, zero, int64_t(head) * c.input.count + t, loss);
    }
  }
  return fine;
}

void sum(const Input& in, int head, int from, int count, double* out) {
  const int width = padded(in.dim);
  alignas(64) float x[MAX_DIM + 16], some[MAX_DIM + 16];
  for (int start = from; start < from + count; start += 64) {
    const int stop = start + 64 < from + count ? start + 64 : from + count;
    for (int t = start; t < stop; t++) {
      read_row(in, head, t, in.dim, x);
      for (int i = 0; i < width; i += W) store(some + i, t == start ? load(x + i) : load(some + i) + load(x + i));
    }
    for (int i = 0; i < in.dim; i++) out[i] += double(some[i]);
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool

#include "project.hpp"

namespace kvtool {

#define KVTOOL_ENCODER_(x) x##_encoder
#define KVTOOL_ENCODER(x) KVTOOL_ENCODER_(x)
extern const Encoder KVTOOL_ENCODER(KVTOOL_LEVEL);
const Encoder KVTOOL_ENCODER(KVTOOL_LEVEL) = {KVTOOL_INSIDE::rotated, KVTOOL_INSIDE::affine, KVTOOL_INSIDE::signs, KVTOOL_INSIDE::sum};

}  // namespace kvtool
