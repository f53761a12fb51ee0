// Values of 16 and 32 bits to float32 and back.
#pragma once
#include "narrow.hpp"
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// `count` values from value `from` on, and zeros up to a multiple of 16.
inline void widened(const Reals& given, int64_t from, int count, float* to) {
  const float* reals = (const float*)given.x + from;
  const uint16_t* halves = (const uint16_t*)given.x + from;
  const Type type = given.type;
  int i = 0;
  for (; i + W <= count; i += W)
    store(to + i, type == Type::FLOAT32 ? load(reals + i) : type == Type::FLOAT16 ? load_half(halves + i) : load_bfloat(halves + i));
  for (; i < count; i++) to[i] = type == Type::FLOAT32 ? reals[i] : type == Type::FLOAT16 ? half(halves[i]) : bfloat(halves[i]);
  for (; i < padded(count); i++) to[i] = 0;
}

// `count` values as value `to` and the next of `out`.
inline void narrowed(const float* x, int count, Type type, int64_t to, uint8_t* out) {
  const auto all = [&](auto values, auto* at) {
    int i = 0;
    for (; i + W <= count; i += W) values.write(at + i, load(x + i));
    for (; i < count; i++) at[i] = values.from(x[i]);
  };
  if (type == Type::FLOAT32) return all(Values<Type::FLOAT32>(), (float*)out + to);
  if (type == Type::FLOAT16) return all(Values<Type::FLOAT16>(), (uint16_t*)out + to);
  all(Values<Type::BFLOAT16>(), (uint16_t*)out + to);
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
