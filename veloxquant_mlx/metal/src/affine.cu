// Group-wise asymmetric quantization between a group's minimum and maximum. Elements that are not finite stand outside the group.

__device__ inline bool affine_finite(float v) {  // false for NaN
  return fabsf(v) <= 3.402823466e+38f;
}

// Minimum and maximum of the finite elements seen so far.
struct AffineRange {
  float low;
  float high;
};

__device__ inline AffineRange affine_nothing() {
  return {__int_as_float(0x7f800000), __int_as_float(0xff800000)};
}

__device__ inline void affine_include(AffineRange& range, float v) {
  if (affine_finite(v)) {
    range.low = fminf(range.low, v);
    range.high = fmaxf(range.high, v);
  }
}

__device__ inline float affine_scale(AffineRange range, float levels, float smallest) {
  return fmaxf(__fdiv_rn(__fsub_rn(range.high, range.low), levels), smallest);
}

__device__ inline float affine_code(float v, float low, float scale, float levels) {
  return fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(v, low), scale)), 0.0f), levels);  // rintf: half to even
}

__device__ inline float affine_value(float code, float low, float scale) {
  return __fadd_rn(__fmul_rn(code, scale), low);  // two roundings, as a decoder that stores the code has them
}

__device__ inline float affine_round_trip(float v, AffineRange range, float scale, float levels) {
  return affine_finite(v) ? affine_value(affine_code(v, range.low, scale, levels), range.low, scale) : v;
}

// Groups along axis -2 of x (outer, length, inner): one thread per group and inner position. dims: outer, length, inner, group.
template <typename X>
__device__ inline void affine_columns(const X* x, const float* params, const int* dims, X* out, unsigned i) {
  const int length = dims[1];
  const int inner = dims[2];
  const int group = dims[3];
  const int groups = (length + group - 1) / group;
  if (i >= unsigned(dims[0]) * unsigned(groups) * unsigned(inner)) {
    return;
  }
  const int first = int(i / unsigned(inner) % unsigned(groups)) * group;
  const int count = min(group, length - first);
  const size_t outer = size_t(i / (unsigned(inner) * unsigned(groups)));
  const size_t base = (outer * size_t(length) + size_t(first)) * size_t(inner) + size_t(i % unsigned(inner));
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

// Groups along axis -1 of x (rows, length): one warp per group, in whole warps. dims: rows, length, group, warps.
template <typename X>
__device__ inline void affine_rows(const X* x, const float* params, const int* dims, X* out, unsigned warp, unsigned lane) {
  const int length = dims[1];
  const int group = dims[2];
  const unsigned groups = unsigned((length + group - 1) / group);
  const unsigned total = unsigned(dims[0]) * groups;
  for (unsigned i = warp; i < total; i += unsigned(dims[3])) {
    const int first = int(i % groups) * group;
    const int count = min(group, length - first);
    const size_t base = size_t(i / groups) * size_t(length) + size_t(first);
    AffineRange range = affine_nothing();
    for (int j = int(lane); j < count; j += 32) {
      affine_include(range, float(x[base + j]));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      range.low = fminf(range.low, __shfl_xor_sync(0xffffffffu, range.low, step));
      range.high = fmaxf(range.high, __shfl_xor_sync(0xffffffffu, range.high, step));
    }
    const float scale = affine_scale(range, params[0], params[1]);
    for (int j = int(lane); j < count; j += 32) {
      out[base + j] = X(affine_round_trip(float(x[base + j]), range, scale, params[0]));
    }
  }
}
