// What queries make of components by way of the pairs of columns that RoPE turns slowly (interpolated.hpp).
#pragma once
#include "interpolated.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int MANY = 512;  // tokens from which on tables are worth making

// What a query makes of each component's row, and of the mean, at each node: (components and 1, nodes R), of pairs that are interpolated
// and of entries that are not rotated. `turned` has room for (D, nodes R).
template <class Slow>
inline void at_nodes(const Problem& p, int head, int token, const Slow& slow, float* turned, float* out, int64_t row) {
  const Components& c = p.keys.components;
  const int R = p.padded_rows, size = c.first[head + 1] - c.first[head], end = p.rope_first + 2 * p.half;
  const float *basis = p.keys.basis + int64_t(c.first[head]) * p.dim, *mean = p.keys.basis + int64_t(c.first[p.keys.heads] + head) * p.dim;
  memset(turned, 0, sizeof(float) * p.dim * row);
  for (int i = 0; i < Slow::COUNT; i++) {
    const float *cos = p.angles + int64_t(token + slow.node[i]) * 2 * p.half, *sin = cos + p.half;
    for (int r = 0; r < R; r++) {
      const float* q = p.turned + (int64_t(head) * R + r) * p.dim;
      float* to = turned + i * R + r;
      for (int d = 0; d < p.rope_first; d++) to[d * row] = q[d];
      for (int d = end; d < p.dim; d++) to[d * row] = q[d];
      for (int j = slow.first; j < p.half; j++) {
        const float a = q[p.rope_first + j], b = q[p.rope_first + p.half + j];
        to[(p.rope_first + j) * row] = a * cos[j] + b * sin[j], to[(p.rope_first + p.half + j) * row] = b * cos[j] - a * sin[j];
      }
    }
  }
  memset(out, 0, sizeof(float) * (size + 1) * row);
  const float one[4] = {1, 1, 1, 1};
  auto add = [&](int first, int last) {
    if (first >= last) return;
    const Matrix of{turned + first * row, row};
    int i = 0;
    for (; i + 4 <= size; i += 4) {
      float* to = out + i * row;
      sums_of<4>(basis + i * p.dim + first, p.dim, 1, one, {to, row}, of, last - first, int(row), to, row);
    }
    for (; i <= size; i++) {
      float* to = out + i * row;
      sums_of<1>((i < size ? basis + i * p.dim : mean) + first, p.dim, 1, one, {to, row}, of, last - first, int(row), to, row);
    }
  };
  add(0, p.rope_first), add(p.rope_first + slow.first, p.rope_first + p.half), add(p.rope_first + p.half + slow.first, end), add(end, p.dim);
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
