// Sylvester's matrix of a power of two times a row.
#pragma once
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// a - b, and the same where sums and products have units of their own: those of products would idle among sums and differences alone.
struct Difference {
  template <class T>
  T operator()(T a, T b) const { return a - b; }
};
struct DifferenceOfProduct {
  V operator()(V a, V b) const {
#if defined(__AVX512F__)
    return (V)_mm512_fnmadd_ps((__m512)b, _mm512_set1_ps(1), (__m512)a);
#elif defined(__AVX2__)
    return (V)_mm256_fnmadd_ps((__m256)b, _mm256_set1_ps(1), (__m256)a);
#else
    return a - b;
#endif
  }
};

// Sylvester's matrix of size N times N vectors. A template for each step, for a loop of loops would not stay in registers.
template <int N, int STEP = 1, class T, class Minus = Difference>
inline __attribute__((always_inline)) void combine(T* v, Minus minus = {}) {
  if constexpr (STEP < N) {
    for (int i = 0; i < N; i++)
      if (!(i & STEP)) {
        T a = v[i], b = v[i + STEP];
        v[i] = a + b, v[i + STEP] = minus(a, b);
      }
    combine<N, 2 * STEP>(v, minus);
  }
}

template <int VECTORS>
inline void butterflies(const float* x, V* v) {
  for (int i = 0; i < VECTORS; i++) v[i] = hadamard(load(x + W * i));
  combine<VECTORS>(v);
}

template <int VECTORS>
void sylvester_of(float* x) {
  V v[VECTORS];
  butterflies<VECTORS>(x, v);
  for (int i = 0; i < VECTORS; i++) store(x + W * i, v[i]);
}

// Sylvester's matrix of size n = 2^k times x, in place.
inline void sylvester(float* x, int n) {
  if (n == 4 * W) return sylvester_of<4>(x);
  if (n == 8 * W) return sylvester_of<8>(x);
  int step = 1;
  if (n >= W) {
    for (int i = 0; i < n; i += W) store(x + i, hadamard(load(x + i)));
    step = W;
  }
  for (; step < n; step *= 2)
    for (int i = 0; i < n; i += 2 * step)
      for (int j = i; j < i + step; j++) {
        float a = x[j], b = x[j + step];
        x[j] = a + b, x[j + step] = a - b;
      }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
