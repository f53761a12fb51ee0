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

// The same code without a division: n = v - low is divided by a scale whose reciprocal is rounded right, and two corrections round the
// quotient right (Markstein 1990). Beyond these scales a remainder might not be a float32.
struct AffineStep {
  float scale;
  float inverse;
  bool regular;

  __device__ inline explicit AffineStep(float scale_)
      : scale(scale_), inverse(__frcp_rn(scale_)), regular(scale_ > 8.077935669e-28f && scale_ < 1.237940039e27f) {}

  __device__ inline float divide(float n) const {
    float q = __fmul_rn(n, inverse);
    q = fmaf(fmaf(-q, scale, n), inverse, q);
    return fmaf(fmaf(-q, scale, n), inverse, q);
  }
};

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

// Eight 16-bit elements.
template <typename X>
struct AffineOctet {
  uint4 bits;

  __device__ inline float operator[](int e) const {
    const uint32_t word = e < 2 ? bits.x : e < 4 ? bits.y : e < 6 ? bits.z : bits.w;
    const uint16_t half = uint16_t(word >> (16 * (e % 2)));
    return float(*reinterpret_cast<const X*>(&half));
  }

  __device__ inline void put(int e, float first, float second) {
    const X pair[2] = {X(first), X(second)};
    uint32_t& word = e < 2 ? bits.x : e < 4 ? bits.y : e < 6 ? bits.z : bits.w;
    word = uint32_t(*reinterpret_cast<const uint16_t*>(pair)) | uint32_t(*reinterpret_cast<const uint16_t*>(pair + 1)) << 16;
  }
};

// `affine_round_trip` where all steps of the lanes are `regular`.
__device__ inline float affine_round_trip(float v, float low, AffineStep step, float levels) {
  const float code = fminf(fmaxf(rintf(step.divide(__fsub_rn(v, low))), 0.0f), levels);
  return affine_finite(v) ? affine_value(code, low, step.scale) : v;
}

__device__ inline void affine_widen(AffineRange& range, int step) {
  range.low = fminf(range.low, __shfl_xor_sync(0xffffffffu, range.low, step));
  range.high = fmaxf(range.high, __shfl_xor_sync(0xffffffffu, range.high, step));
}

// `affine_columns` of 16-bit elements, inner a multiple of 8 and at most 8 * ROWS * PARTS rows a group: PARTS consecutive warps of a block
// have 32 columns of a group, which stay in registers, 8 a lane; lane l has columns 8 (l % 4) on and rows l / 4, l / 4 + 8, ... of the warp's
// part. shared: a place for each thread of the block. False where x is not aligned.
template <int ROWS, int PARTS, typename X>
__device__ inline bool affine_column_octets(
    const X* x, const float* params, const int* dims, X* out, unsigned warp, unsigned lane, AffineRange* shared) {
  if (reinterpret_cast<size_t>(x) % 16 != 0) {
    return false;
  }
  const int length = dims[1], group = dims[3];
  const unsigned octets = unsigned(dims[2]) / 8, groups = unsigned((length + group - 1) / group), across = (octets + 3) / 4;
  const unsigned job = warp / PARTS, part = warp % PARTS;
  const unsigned octet = job % across * 4 + lane % 4, which = job / across;
  const int row0 = int(part) * 8 * ROWS + int(lane / 4);
  const int first = int(which % groups) * group, count = octet < octets && which / groups < unsigned(dims[0]) ? min(group, length - first) : 0;
  const size_t base = (size_t(which / groups) * size_t(length) + size_t(first)) * octets + octet;
  const uint4* from = reinterpret_cast<const uint4*>(x) + base;
  AffineOctet<X> own[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = 8 * r + row0;
    own[r].bits = row < count ? __ldg(from + size_t(row) * octets) : make_uint4(0, 0, 0, 0);
  }
  AffineRange range[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    range[e] = affine_nothing();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (8 * r + row0 < count) {
        affine_include(range[e], own[r][e]);
      }
    }
    affine_widen(range[e], 4);
    affine_widen(range[e], 8);
    affine_widen(range[e], 16);
  }
  // Lane l computes the scale of column l / 4. Chosen by halves: an index would put the ranges in local memory.
  float low[4], high[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    low[e] = lane & 16 ? range[e + 4].low : range[e].low;
    high[e] = lane & 16 ? range[e + 4].high : range[e].high;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    low[e] = lane & 8 ? low[e + 2] : low[e];
    high[e] = lane & 8 ? high[e + 2] : high[e];
  }
  AffineRange mine = {lane & 4 ? low[1] : low[0], lane & 4 ? high[1] : high[0]};
  if (PARTS > 1) {
    shared[threadIdx.x] = mine;
    __syncthreads();
#pragma unroll
    for (int p = 1; p < PARTS; ++p) {
      const AffineRange other = shared[threadIdx.x - part * 32 + (part + p) % PARTS * 32];
      mine.low = fminf(mine.low, other.low);
      mine.high = fmaxf(mine.high, other.high);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      range[e].low = __shfl_sync(0xffffffffu, mine.low, lane % 4 + 4 * e);
    }
  }
  AffineStep step(affine_scale(mine, params[0], params[1]));
  const float scale = step.scale, inverse = step.inverse;
  const bool regular = __all_sync(0xffffffffu, step.regular);
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    AffineStep near = step, far = step;
    near.scale = __shfl_sync(0xffffffffu, scale, lane % 4 + 4 * e);
    near.inverse = __shfl_sync(0xffffffffu, inverse, lane % 4 + 4 * e);
    far.scale = __shfl_sync(0xffffffffu, scale, lane % 4 + 4 * e + 4);
    far.inverse = __shfl_sync(0xffffffffu, inverse, lane % 4 + 4 * e + 4);
    if (regular) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        own[r].put(
            e, affine_round_trip(own[r][e], range[e].low, near, params[0]), affine_round_trip(own[r][e + 1], range[e + 1].low, far, params[0]));
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        own[r].put(
            e, affine_round_trip(own[r][e], range[e], near.scale, params[0]),
            affine_round_trip(own[r][e + 1], range[e + 1], far.scale, params[0]));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = 8 * r + row0;
    if (row < count) {
      reinterpret_cast<uint4*>(out)[base + size_t(row) * octets] = own[r].bits;
    }
  }
  return true;
}

// `affine_rows` of 16-bit elements, group = 8 LANES and the length a multiple of it: a lane has 8 elements twice. False where x is not aligned.
template <int LANES, typename X>
__device__ inline bool affine_row_octets(const X* x, const float* params, const int* dims, X* out, unsigned thread_, unsigned threads) {
  if (reinterpret_cast<size_t>(x) % 16 != 0) {
    return false;
  }
  const unsigned total = unsigned(dims[0]) * (unsigned(dims[1]) / 8);
  const uint4* from = reinterpret_cast<const uint4*>(x);
  // Whole warps go round: total is a multiple of LANES, and lanes beyond it repeat the last group.
  for (unsigned start = thread_ / 32 * 32; start < total; start += 2 * threads) {
    AffineOctet<X> own[2];
    unsigned at[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      at[k] = start + k * threads + thread_ % 32;
      own[k].bits = __ldg(from + (at[k] < total ? at[k] : total - LANES + thread_ % LANES));
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      AffineRange range = affine_nothing();
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        affine_include(range, own[k][e]);
      }
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) {
        affine_widen(range, step);
      }
      const AffineStep one(affine_scale(range, params[0], params[1]));
      const bool regular = __all_sync(0xffffffffu, one.regular);
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        if (regular) {
          own[k].put(e, affine_round_trip(own[k][e], range.low, one, params[0]), affine_round_trip(own[k][e + 1], range.low, one, params[0]));
        } else {
          own[k].put(
              e, affine_round_trip(own[k][e], range, one.scale, params[0]), affine_round_trip(own[k][e + 1], range, one.scale, params[0]));
        }
      }
      if (at[k] < total) {
        reinterpret_cast<uint4*>(out)[at[k]] = own[k].bits;
      }
    }
  }
  return true;
}
