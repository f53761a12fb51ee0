// Slow rotations of a span of tokens, interpolated between a few of them.
//
//     <q, R_t k> = sum over nodes of weight[node, t] <R_node^-1 q, k>          R_t = sum over nodes of weight[node, t] R_node
//
// Of pairs that turn by little from one token to the next, which most do, what a query makes of a key is so a few numbers linear in the
// key, in the place of the key's two entries for each pair. Weights are Lagrange's polynomials, nodes Chebyshev's.
#pragma once
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int NODES = 6;
constexpr float SLOW = 1e-5f;  // largest error of a cosine or sine, found midway between nodes

struct Interpolated {
  int first;             // pairs from this one on are interpolated
  int node[NODES];       // tokens of the span
  const float* weights;  // (NODES, row)
  int64_t row;
};

// Nodes of a span, their weights of `width` tokens, and which pairs, the last ones, they stand for well enough.
inline Interpolated interpolate(const Problem& p, int token, int count, int width, float* weights, int64_t row) {
  Interpolated to{p.half, {}, weights, row};
  // Between nodes and at the ends the error is largest.
  constexpr double PI = 3.14159265358979323846;
  int sample[NODES + 1];
  for (int i = 0; i < NODES; i++) to.node[i] = int((count - 1) * 0.5 * (1 - __builtin_cos(PI * (i + 0.5) / NODES)) + 0.5);
  for (int i = 0; i <= NODES; i++) sample[i] = int((count - 1) * 0.5 * (1 - __builtin_cos(PI * i / NODES)) + 0.5);
  float over[NODES];
  for (int i = 0; i < NODES; i++) {
    over[i] = 1;
    for (int j = 0; j < NODES; j++)
      if (j != i) over[i] /= float(to.node[i] - to.node[j]);
  }
  V lane;
  for (int i = 0; i < W; i++) lane[i] = float(i);
  for (int t = 0; t < width; t += W) {
    for (int i = 0; i < NODES; i++) {
      V x = all(over[i]);
      for (int j = 0; j < NODES; j++)
        if (j != i) x *= lane + float(t - to.node[j]);
      store(weights + i * row + t, x);
    }
  }
  const float* angles = p.angles + int64_t(token) * 2 * p.half;
  alignas(64) float worst[MAX_DIM] = {};
  for (int s : sample)
    for (int j = 0; j < 2 * p.half; j++) {
      float error = angles[int64_t(s) * 2 * p.half + j];
      for (int i = 0; i < NODES; i++) error -= weights[i * row + s] * angles[int64_t(to.node[i]) * 2 * p.half + j];
      error = __builtin_fabsf(error);
      worst[j] = error > worst[j] ? error : worst[j];
    }
  const float *c = angles, *d = angles + p.half;
  while (to.first > 0) {
    const int j = to.first - 1;
    const float limit = SLOW * __builtin_sqrtf(c[j] * c[j] + d[j] * d[j]);
    if (!(worst[j] <= limit && worst[p.half + j] <= limit)) break;
    to.first = j;
  }
  return to;
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
