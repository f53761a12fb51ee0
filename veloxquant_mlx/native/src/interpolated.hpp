// Slow rotations of a span of tokens, interpolated between a few of them.
//
//     <q, R_t k> = sum over nodes of weight[node, t] <R_node^-1 q, k>          R_t = sum over nodes of weight[node, t] R_node
//
// Of pairs that turn by little from one token to the next, which most do, what a query makes of a key is so a few numbers linear in the
// key, in the place of the key's two entries for each pair. Weights are Lagrange's polynomials, nodes Chebyshev's. Within a strip of few
// tokens those numbers, smooth as they are, are interpolated in turn between fewer nodes.
#pragma once
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int NODES = 6;
constexpr int COARSE = 8, FINE = 4, STRIP = 64;  // nodes of a span that is taken in strips, of a strip, and its tokens
constexpr float SLOW = 1e-5f;  // largest error of a cosine or sine, found midway between nodes

struct Interpolated {
  static constexpr int COUNT = NODES, ROWS = NODES;  // nodes of the span, and rows that `weights` needs
  int first;             // pairs from this one on are interpolated
  int node[NODES];       // tokens of the span
  const float* weights;  // (NODES, row)
  int64_t row;
};

// The first of the last pairs whose cosines and sines, in a table, have no larger errors than is allowed.
inline int first_slow(const Problem& p, const float* angles, const float* worst) {
  const float *c = angles, *d = angles + p.half;
  int first = p.half;
  while (first > 0) {
    const int j = first - 1;
    const float limit = SLOW * __builtin_sqrtf(c[j] * c[j] + d[j] * d[j]);
    if (!(worst[j] <= limit && worst[p.half + j] <= limit)) break;
    first = j;
  }
  return first;
}

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
  to.first = first_slow(p, angles, worst);
  return to;
}

// As `Interpolated`, in two steps: from the nodes of the span to those of its strips, and from these to tokens.
struct Strips {
  static constexpr int COUNT = COARSE, ROWS = FINE + (FINE * COARSE + STRIP - 1) / STRIP;
  int first;             // pairs from this one on are interpolated
  int node[COARSE];      // tokens of the span
  const float* to_fine;  // (strips, FINE, COARSE)
  const float* weights;  // (FINE, row): of each token, the nodes of its strip
  int64_t row;
};

// x, a number from 0 to 1, of the nodes of Chebyshev's polynomial of degree n, i + 0.5, and where it is largest between them, i.
inline float chebyshev(float i, int n) { return 0.5f * (1 - float(__builtin_cos(3.14159265358979323846 * i / n))); }

// Lagrange's weights at x of n nodes.
inline void lagrange(const float* nodes, int n, float x, float* out) {
  for (int i = 0; i < n; i++) {
    out[i] = 1;
    for (int j = 0; j < n; j++)
      if (j != i) out[i] *= (x - nodes[j]) / (nodes[i] - nodes[j]);
  }
}

// Nodes of a span and of its strips, and which pairs, the last ones, they stand for well enough. `weights` has room for ROWS rows.
inline Strips strips_of(const Problem& p, int token, int count, float* weights, int64_t row) {
  float* to_fine = weights + FINE * row;
  Strips to{p.half, {}, to_fine, weights, row};
  float nodes[COARSE];
  for (int i = 0; i < COARSE; i++) nodes[i] = float(to.node[i] = int((count - 1) * chebyshev(i + 0.5f, COARSE) + 0.5f));
  for (int start = 0; start < count; start += STRIP) {
    const int some = count - start < STRIP ? count - start : STRIP;
    const float length = float(some > FINE ? some - 1 : FINE);  // nodes of a few tokens must not be one
    float fine[FINE];
    for (int f = 0; f < FINE; f++) {
      fine[f] = length * chebyshev(f + 0.5f, FINE);
      lagrange(nodes, COARSE, float(start) + fine[f], to_fine + (start / STRIP * FINE + f) * COARSE);
    }
    if (start && some == STRIP) {
      for (int f = 0; f < FINE; f++) memcpy(weights + f * row + start, weights + f * row, STRIP * sizeof(float));
      continue;
    }
    for (int t = 0; t < padded(some); t++) {
      float own[FINE];
      lagrange(fine, FINE, float(t), own);
      for (int f = 0; f < FINE; f++) weights[f * row + start + t] = own[f];
    }
  }
  // Where the errors of both steps are largest.
  const float* angles = p.angles + int64_t(token) * 2 * p.half;
  alignas(64) float worst[MAX_DIM] = {};
  for (int i = 0; i <= COARSE; i++) {
    const int start = int((count - 1) * chebyshev(float(i), COARSE) + 0.5f) / STRIP * STRIP;
    const int some = count - start < STRIP ? count - start : STRIP;
    for (int k = 0; k <= FINE; k++) {
      const int s = start + int((some - 1) * chebyshev(float(k), FINE) + 0.5f);
      float own[COARSE] = {};
      for (int f = 0; f < FINE; f++)
        for (int n = 0; n < COARSE; n++) own[n] += weights[f * row + s] * to_fine[(start / STRIP * FINE + f) * COARSE + n];
      for (int j = 0; j < 2 * p.half; j++) {
        float error = angles[int64_t(s) * 2 * p.half + j];
        for (int n = 0; n < COARSE; n++) error -= own[n] * angles[int64_t(to.node[n]) * 2 * p.half + j];
        error = __builtin_fabsf(error);
        worst[j] = error > worst[j] ? error : worst[j];
      }
    }
  }
  to.first = first_slow(p, angles, worst);
  return to;
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
