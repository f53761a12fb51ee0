// Rows of floats as they lie in memory, each padded with zeros to a multiple of 16.
#pragma once
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

inline void decode_floats(const Rows& rows, int head, int from, int count, float* out) {
  const int width = padded(rows.dim), whole = rows.dim / W * W;
  for (int t = 0; t < count; t++, out += width) {
    const uint8_t* row = rows.data + head * rows.head + (from + t) * rows.row;
    const float* floats = reinterpret_cast<const float*>(row);
    const uint16_t* words = reinterpret_cast<const uint16_t*>(row);
    if (rows.type == Type::FLOAT32) {
      for (int i = 0; i < whole; i += W) store(out + i, load(floats + i));
      for (int i = whole; i < rows.dim; i++) out[i] = floats[i];
    } else if (rows.type == Type::FLOAT16) {
      for (int i = 0; i < whole; i += W) store(out + i, load_half(words + i));
      for (int i = whole; i < rows.dim; i++) out[i] = half(words[i]);
    } else {
      for (int i = 0; i < whole; i += W) store(out + i, load_bfloat(words + i));
      for (int i = whole; i < rows.dim; i++) out[i] = bfloat(words[i]);
    }
    for (int i = rows.dim; i < width; i++) out[i] = 0;
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
