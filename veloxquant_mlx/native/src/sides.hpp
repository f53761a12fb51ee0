// Scales, steps and zeros in float32.
#pragma once
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

inline float one_of(Side side, int64_t i) {
  return side.wide ? static_cast<const float*>(side.at)[i] : bfloat(static_cast<const uint16_t*>(side.at)[i]);
}

void widen(Side side, int64_t first, int count, float* to) {
  if (side.wide) {
    memcpy(to, static_cast<const float*>(side.at) + first, count * sizeof(float));
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(side.at) + first;
  int i = 0;
  for (; i + W <= count; i += W) store(to + i, load_bfloat(from + i));
  for (; i < count; i++) to[i] = bfloat(from[i]);
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
