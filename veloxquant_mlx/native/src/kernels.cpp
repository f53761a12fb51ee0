// Functions of the kernel API that code rows for no codec, at one SIMD level; compiled once for each.
//
// No product is contracted with a sum (CMakeLists.txt): every level gives the same numbers.
#include "kernels.hpp"

#include "reals.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int LANES = 16;
constexpr int BLOCK = 256;  // values in float32 at a time

void hamming(const Hamming& h, int64_t from, int64_t to) {
  for (int64_t row = from; row < to; row++) {
    const uint8_t* bits = h.bits + row * h.width;
    int64_t count = 0;
    int i = 0;
    for (; i + 8 <= h.width; i += 8) {
      uint64_t a, b;
      memcpy(&a, bits + i, 8), memcpy(&b, h.query + i, 8);
      count += __builtin_popcountll(a ^ b);
    }
    for (; i < h.width; i++) count += __builtin_popcount(unsigned(bits[i] ^ h.query[i]));
    const float product = float(count) * h.scale;
    h.out[row] = product + h.offsets[row];
  }
}

void sign_scores(const SignScores& s, int head, int64_t from, int64_t to) {
  // Sums of four entries for each of their 16 signs.
  constexpr int MOST = 256;  // nibbles at a time
  float sums[MOST][16];
  const float* q = s.q + int64_t(head) * 8 * s.width;
  float* out = s.out + head * s.slots;
  for (int first = 0; first < 2 * s.width; first += MOST) {
    const int nibbles = 2 * s.width - first < MOST ? 2 * s.width - first : MOST;
    for (int n = 0; n < nibbles; n++)
      for (int code = 0; code < 16; code++) {
        const float* x = q + 4 * (first + n);
        sums[n][code] = ((code & 1 ? x[0] : -x[0]) + (code & 2 ? x[1] : -x[1])) + ((code & 4 ? x[2] : -x[2]) + (code & 8 ? x[3] : -x[3]));
      }
    for (int64_t slot = from; slot < to; slot++) {
      const uint8_t* packed = s.packed + (slot * s.heads + head) * s.width + first / 2;
      float even = 0, odd = 0;
      for (int n = 0; n < nibbles; n += 2) even += sums[n][packed[n / 2] & 15], odd += sums[n + 1][packed[n / 2] >> 4];
      out[slot] = (first ? out[slot] : 0) + (even + odd);
    }
  }
  for (int64_t slot = from; slot < to; slot++) out[slot] = s.factor * out[slot] * s.norms[slot * s.heads + head];
}

void project(const Projected& p, int64_t from, int64_t to) {
  alignas(64) float x[BLOCK];
  for (int64_t row = from; row < to; row++) {
    const float* filter = p.filters + row / p.rows * p.dim;
    float sums[LANES] = {};
    for (int at = 0; at < p.dim; at += BLOCK) {
      const int count = p.dim - at < BLOCK ? p.dim - at : BLOCK, whole = count / LANES * LANES;
      widened(p.x, row * p.dim + at, count, x);
      for (int i = 0; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) sums[l] += x[i + l] * filter[at + i + l];
      for (int i = whole; i < count; i++) sums[i - whole] += x[i] * filter[at + i];
    }
    float sum = 0;
    for (float one : sums) sum += one;
    p.out[row] = float(p.sign) * sum;
  }
}

inline bool finite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }

// The lowest and highest of LANES columns, `count` values one after another; what is not finite does not count.
inline void span_of(const float* x, int count, float* low, float* high) {
  for (int i = 0; i < count; i += LANES)
    for (int l = 0; l < LANES; l++) {
      const float value = x[i + l];
      low[l] = finite(value) && value < low[l] ? value : low[l];
      high[l] = finite(value) && value > high[l] ? value : high[l];
    }
}

inline float step_of(const RoundTrip& r, float low, float high) {
  const float step = (high - low) / r.levels;
  return step > r.eps ? step : r.eps;
}

inline float there_and_back(float x, float low, float step, float levels) {
  const float code = __builtin_rintf((x - low) / step), most = code > levels ? levels : code, clipped = most < 0 ? 0 : most;
  const float product = clipped * step;
  return finite(x) ? product + low : x;
}

// A group of neighbouring values.
void along_row(const RoundTrip& r, int64_t first, int64_t count) {
  alignas(64) float x[BLOCK];
  float low[LANES], high[LANES];
  for (int l = 0; l < LANES; l++) low[l] = __builtin_inff(), high[l] = -__builtin_inff();
  for (int64_t at = 0; at < count; at += BLOCK) {
    const int some = int(count - at < BLOCK ? count - at : BLOCK);
    widened(r.x, first + at, some, x);
    for (int i = some; i < padded(some); i++) x[i] = x[some - 1];
    span_of(x, padded(some), low, high);
  }
  for (int l = 1; l < LANES; l++) low[0] = low[l] < low[0] ? low[l] : low[0], high[0] = high[l] > high[0] ? high[l] : high[0];
  const float step = step_of(r, low[0], high[0]);
  for (int64_t at = 0; at < count; at += BLOCK) {
    const int some = int(count - at < BLOCK ? count - at : BLOCK);
    widened(r.x, first + at, some, x);
    for (int i = 0; i < some; i++) x[i] = there_and_back(x[i], low[0], step, r.levels);
    narrowed(x, some, r.x.type, first + at, r.out);
  }
}

// Groups of `count` rows, one for each channel.
void along_columns(const RoundTrip& r, int64_t first, int64_t count) {
  alignas(64) float x[LANES], low[LANES], high[LANES], step[LANES];
  for (int64_t at = 0; at < r.inner; at += LANES) {
    const int some = int(r.inner - at < LANES ? r.inner - at : LANES);
    for (int l = 0; l < LANES; l++) low[l] = __builtin_inff(), high[l] = -__builtin_inff();
    for (int64_t row = 0; row < count; row++) {
      widened(r.x, first + row * r.inner + at, some, x);
      span_of(x, LANES, low, high);
    }
    for (int l = 0; l < LANES; l++) step[l] = step_of(r, low[l], high[l]);
    for (int64_t row = 0; row < count; row++) {
      widened(r.x, first + row * r.inner + at, some, x);
      for (int l = 0; l < LANES; l++) x[l] = there_and_back(x[l], low[l], step[l], r.levels);
      narrowed(x, some, r.x.type, first + row * r.inner + at, r.out);
    }
  }
}

void round_trip(const RoundTrip& r, int64_t from, int64_t to) {
  const int64_t groups = (r.length + r.group - 1) / r.group;
  for (int64_t i = from; i < to; i++) {
    const int64_t start = i % groups * r.group, count = r.length - start < r.group ? r.length - start : r.group;
    const int64_t first = (i / groups * r.length + start) * r.inner;
    r.inner == 1 ? along_row(r, first, count) : along_columns(r, first, count);
  }
}

template <class Index, class Copy>
void gather_by(const Gather& g, int64_t from, int64_t to, Copy copy) {
  const Index* indices = (const Index*)g.indices;
  const int64_t last = g.count - 1;
  for (int64_t i = from; i < to; i++) {
    const int64_t at = indices[i];
    copy(g.out + i * g.width, g.table + (at < last ? at : last) * g.width);
  }
}

template <class Index>
void gather_of(const Gather& g, int64_t from, int64_t to) {
  switch (g.width) {
    case 2: return gather_by<Index>(g, from, to, [](uint8_t* a, const uint8_t* b) { memcpy(a, b, 2); });
    case 4: return gather_by<Index>(g, from, to, [](uint8_t* a, const uint8_t* b) { memcpy(a, b, 4); });
    case 8: return gather_by<Index>(g, from, to, [](uint8_t* a, const uint8_t* b) { memcpy(a, b, 8); });
    case 16: return gather_by<Index>(g, from, to, [](uint8_t* a, const uint8_t* b) { memcpy(a, b, 16); });
    case 32: return gather_by<Index>(g, from, to, [](uint8_t* a, const uint8_t* b) { memcpy(a, b, 32); });
    default: return gather_by<Index>(g, from, to, [&](uint8_t* a, const uint8_t* b) { memcpy(a, b, size_t(g.width)); });
  }
}

void gather(const Gather& g, int64_t from, int64_t to) {
  g.size == 1 ? gather_of<uint8_t>(g, from, to) : g.size == 2 ? gather_of<uint16_t>(g, from, to) : gather_of<uint32_t>(g, from, to);
}

void drop_row(const DropRow& d, int64_t from, int64_t to) {
  const int64_t left = d.rows - 1;
  for (int64_t at = from; at < to;) {
    const int64_t group = at / left, row = at % left, gone = d.gone[group];
    const int64_t end = row < gone ? gone : left, some = end - row < to - at ? end - row : to - at;
    memcpy(d.out + at * d.width, d.x + (group * d.rows + row + (row >= gone)) * d.width, size_t(some * d.width));
    at += some;
  }
}

void turn_back(const TurnBack& t, int64_t from, int64_t to) {
  alignas(64) float a[BLOCK], b[BLOCK];
  const int64_t left = t.rows - 1, width = int64_t(t.dim) * (t.x.type == Type::FLOAT32 ? 4 : 2);
  const int half = t.dim / 2;
  const float *cos = t.turn, *sin = cos + half;
  for (int64_t at = from; at < to; at++) {
    const int64_t group = at / left, row = at % left, gone = t.gone[group], source = group * t.rows + row + (row >= gone);
    if (t.positions[source] <= t.positions[group * t.rows + gone]) {
      memcpy(t.out + at * width, t.x.x + source * width, size_t(width));
      continue;
    }
    for (int first = 0; first < half; first += BLOCK) {
      const int count = half - first < BLOCK ? half - first : BLOCK;
      widened(t.x, source * t.dim + first, count, a);
      widened(t.x, source * t.dim + half + first, count, b);
      for (int i = 0; i < count; i++) {
        const float u = a[i], v = b[i], c = cos[first + i], s = sin[first + i];
        a[i] = u * c + v * s, b[i] = v * c - u * s;
      }
      narrowed(a, count, t.x.type, at * t.dim + first, t.out);
      narrowed(b, count, t.x.type, at * t.dim + half + first, t.out);
    }
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE

#define KVTOOL_KERNELS_(x) x##_kernels
#define KVTOOL_KERNELS(x) KVTOOL_KERNELS_(x)
const Kernels KVTOOL_KERNELS(KVTOOL_LEVEL) = {
    KVTOOL_INSIDE::hamming, KVTOOL_INSIDE::sign_scores, KVTOOL_INSIDE::project,  KVTOOL_INSIDE::round_trip,
    KVTOOL_INSIDE::gather,  KVTOOL_INSIDE::drop_row,    KVTOOL_INSIDE::turn_back};

}  // namespace kvtool
