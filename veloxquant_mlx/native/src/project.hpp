// Signs of random projections of rows, and their lengths: the last part of encode.cpp.
#pragma once
#include "coding.hpp"
#include "simd.hpp"
#include "sylvester.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// sqrt(D) T x in place, D = odd 2^k.
void turn(const float* hartley, int odd, int dim, float* x) {
  const int power = dim / odd;
  for (int i = 0; i < odd; i++) sylvester(x + i * power, power);
  if (odd == 1) return;
  float all_of_it[MAX_DIM];
  memcpy(all_of_it, x, dim * sizeof(float));
  for (int i = 0; i < odd; i++)
    for (int j = 0; j < power; j++) {
      float sum = 0;
      for (int l = 0; l < odd; l++) sum += hartley[i * odd + l] * all_of_it[l * power + j];
      x[i * power + j] = sum;
    }
}

inline void multiply(const float* by, int dim, float* x) {
  int i = 0;
  for (; i + W <= dim; i += W) store(x + i, load(x + i) * load(by + i));
  for (; i < dim; i++) x[i] *= by[i];
}

bool signs(const SignCoding& c, int head, int from, int count) {
  const int dim = c.input.dim, width = padded(dim), bytes = (c.blocks * dim + 7) / 8;
  alignas(64) float mean[MAX_DIM + 16] = {}, x[MAX_DIM + 16], apart[MAX_DIM + 16], y[MAX_DIM + 16];
  uint8_t codes[MAX_BLOCKS * MAX_DIM + 16];
  for (int i = 0; c.mean && i < dim; i++) mean[i] = bfloat(c.mean[head * int64_t(dim) + i]);
  for (int t = from; t < from + count; t++) {
    read_row(c.input, head, t, dim, x);
    if (!sound(x, width)) return false;
    // Divided by its largest value, a row's sum of squares lies in [1, D]: neither overflow nor underflow.
    const float largest = largest_of(x, width), over = largest >= SMALLEST ? 1 / largest : 0;
    Sum plain, centred;
    for (int i = 0; i < width; i += W) {
      const V value = load(x + i) * over, less = value - load(mean + i) * over;
      store(x + i, value), store(apart + i, less);
      plain.add(i, value * value), centred.add(i, less * less);
    }
    const float with = centred.total(), without = plain.total();
    const bool nearer = c.mean && with < without;
    const float length = largest * __builtin_sqrtf(nearer ? with : without), norm = length >= SMALLEST ? length : 0;
    for (int b = 0; b < c.blocks; b++) {
      const float *first = c.turns + 2 * b * dim, *second = first + dim;
      memcpy(y, nearer ? apart : x, dim * sizeof(float));
      multiply(first, dim, y), turn(c.hartley, c.odd, dim, y);
      multiply(second, dim, y), turn(c.hartley, c.odd, dim, y);
      for (int i = dim; i < width; i++) y[i] = 0;
      for (int i = 0; i < width; i += W) store_bytes(codes + b * dim + i, (load(y + i) >= V{}) & 1);
    }
    memset(codes + c.blocks * dim, 0, 16);
    pack(codes, c.blocks * dim, 1, c.codes + (int64_t(head) * c.input.count + t) * bytes);
    c.norm[int64_t(head) * c.input.count + t] = to_bfloat(c.mean && !nearer ? -norm : norm);
  }
  return true;
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
