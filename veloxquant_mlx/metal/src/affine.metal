// Group-wise asymmetric quantization between a group's minimum and maximum. Elements that are not finite stand outside the group.

constant float AFFINE_LARGEST = 3.402823466e+38f;

METAL_FUNC bool affine_finite(float v) {  // false for NaN
  return metal::abs(v) <= AFFINE_LARGEST;
}

// Minimum and maximum of the finite elements seen so far.
struct AffineRange {
  float low;
  float high;
};

METAL_FUNC AffineRange affine_nothing() {
  return {INFINITY, -INFINITY};
}

METAL_FUNC void affine_include(thread AffineRange& range, float v) {
  if (affine_finite(v)) {
    range.low = metal::min(range.low, v);
    range.high = metal::max(range.high, v);
  }
}

METAL_FUNC float affine_scale(AffineRange range, float levels, float smallest) {
#pragma clang fp contract(off)
  return metal::max((range.high - range.low) / levels, smallest);
}

METAL_FUNC float affine_code(float v, float low, float scale, float levels) {
#pragma clang fp contract(off)
  return metal::clamp(metal::rint((v - low) / scale), 0.0f, levels);  // rint: half to even
}

METAL_FUNC float affine_value(float code, float low, float scale) {
#pragma clang fp contract(off)  // two roundings, as a decoder that stores the code has them
  const float step = code * scale;
  return step + low;
}

METAL_FUNC float affine_round_trip(float v, AffineRange range, float scale, float levels) {
  return affine_finite(v) ? affine_value(affine_code(v, range.low, scale, levels), range.low, scale) : v;
}

// Groups along axis -2 of x (outer, length, inner): one thread per group and inner position. dims: outer, length, inner, group.
template <typename X>
METAL_FUNC void affine_columns(const device X* x, const device float* params, const device int* dims, device X* out, uint i) {
  const int length = dims[1];
  const int inner = dims[2];
  const int group = dims[3];
  const int groups = (length + group - 1) / group;
  if (i >= uint(dims[0]) * uint(groups) * uint(inner)) {
    return;
  }
  const int first = int(i / uint(inner) % uint(groups)) * group;
  const int count = metal::min(group, length - first);
  const size_t outer = size_t(i / (uint(inner) * uint(groups)));
  const size_t base = (outer * size_t(length) + size_t(first)) * size_t(inner) + size_t(i % uint(inner));
  AffineRange range = affine_nothing();
  for (int j = 0; j < count; ++j) {
    affine_include(range, float(x[base + size_t(j) * size_t(inner)]));
  }
  const float scale = affine_scale(range, params[0], params[1]);
  for (int j = 0; j < count; ++j) {
    const size_t at = base + size_t(j) * size_t(inner);
    out[at] = X(affine_round_trip(float(x[at]), range, scale, params[0]));
  }
}

// Groups along axis -1 of x (rows, length): one SIMD-group per group, in whole SIMD-groups. dims: rows, length, group, SIMD-groups.
template <typename X>
METAL_FUNC void affine_rows(const device X* x, const device float* params, const device int* dims, device X* out, uint simdgroup, uint lane) {
  const int length = dims[1];
  const int group = dims[2];
  const uint groups = uint((length + group - 1) / group);
  const uint total = uint(dims[0]) * groups;
  for (uint i = simdgroup; i < total; i += uint(dims[3])) {
    const int first = int(i % groups) * group;
    const int count = metal::min(group, length - first);
    const size_t base = size_t(i / groups) * size_t(length) + size_t(first);
    AffineRange range = affine_nothing();
    for (int j = int(lane); j < count; j += 32) {
      affine_include(range, float(x[base + j]));
    }
    for (ushort step = 16; step > 0; step /= 2) {
      range.low = metal::min(range.low, simd_shuffle_xor(range.low, step));
      range.high = metal::max(range.high, simd_shuffle_xor(range.high, step));
    }
    const float scale = affine_scale(range, params[0], params[1]);
    for (int j = int(lane); j < count; j += 32) {
      out[base + j] = X(affine_round_trip(float(x[base + j]), range, scale, params[0]));
    }
  }
}
