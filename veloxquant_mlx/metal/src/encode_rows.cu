// Rows of live caches and files coded in one pass. Needs rotate.
namespace kvtool {

constexpr int ENCODE_THREADS = 256;
constexpr float ENCODE_SMALLEST = 1.0f / (1ull << 60) / (1ull << 60);  // below it a row's values, or a group's step, count as zero

enum EncodeScale { ENCODE_NORM, ENCODE_LS, ENCODE_UNBIASED };

// Cells of 2^BITS points in shared memory: their boundaries, and the points behind.
template <int BITS, bool TIES_UP>
struct EncodeCells {
  const float* boundaries;

  // How many boundaries are below x, or (TIES_UP) not above it.
  __device__ inline unsigned operator()(float x) const {
    unsigned at = 0;
#pragma unroll
    for (unsigned step = 1u << (BITS - 1); step > 0; step /= 2) {
      const float boundary = boundaries[at + step - 1];
      at += (TIES_UP ? x >= boundary : x > boundary) ? step : 0u;
    }
    return at;
  }
  __device__ inline float point(unsigned at) const {
    return boundaries[(1 << BITS) - 1 + at];
  }
};

// Eight codes of a row as BITS bytes.
template <int BITS>
__device__ inline void encode_store(uint8_t* to, uint64_t codes) {
  if (BITS == 8) {
    *reinterpret_cast<uint2*>(to) = make_uint2(uint32_t(codes), uint32_t(codes >> 32));
  } else if (BITS == 4) {
    *reinterpret_cast<uint32_t*>(to) = uint32_t(codes);
  } else if (BITS == 2) {
    *reinterpret_cast<uint16_t*>(to) = uint16_t(codes);
  } else {
#pragma unroll
    for (int i = 0; i < BITS; i++) {
      to[i] = uint8_t(codes >> (8 * i));
    }
  }
}

// The nearest bfloat16, ties to even, of a finite number.
__device__ inline uint16_t encode_bfloat(float x) {
  const uint32_t bits = __float_as_uint(x);
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// The nearest bfloat16 not below (UP) or not above a finite number.
template <bool UP>
__device__ inline uint16_t encode_outward(float x) {
  const uint32_t bits = __float_as_uint(x);
  return uint16_t((bits >> 16) + ((bits & 0xffffu) != 0 && (bits >> 31) == (UP ? 0u : 1u) ? 1u : 0u));
}

template <int W>
__device__ inline float encode_row_max(float x) {
#pragma unroll
  for (int stride = 1; stride < W; stride *= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, stride));
  }
  return x;
}

// Codes and scales of rotated rows: x' = x, or x less its head's mean where that is smaller; y = H (signs x') / |x'|; one or two stages of
// codes; the scale, without a sign where the mean was taken off. A row takes W lanes, eight elements each. tables: boundaries and points of
// each stage. dims: rows of all heads, rows of one.
template <int D, int BITS1, int BITS2, int SCALE, bool CENTER, bool TIES_UP, typename T>
__device__ inline void encode_rotated(
    const T* x,
    const float* mean,
    const float* signs,
    const float* tables,
    const int* dims,
    uint8_t* codes1,
    uint8_t* codes2,
    uint16_t* scales,
    float* shared) {
  constexpr int C = D > 256 ? D / 256 : 1, W = D < 256 ? D / 8 : 32, ROWS = 32 / W;
  constexpr int FIRST = (2 << BITS1) - 1, ALL = FIRST + (BITS2 > 0 ? (2 << BITS2) - 1 : 0);
  for (int i = int(threadIdx.x); i < ALL; i += ENCODE_THREADS) {
    shared[i] = tables[i];
  }
  __syncthreads();
  const EncodeCells<BITS1, TIES_UP> first{shared};
  const EncodeCells<(BITS2 > 0 ? BITS2 : 1), TIES_UP> second{shared + FIRST};

  const uint32_t lane = threadIdx.x % 32, octet = lane % W;
  const int row = int(blockIdx.x * (ENCODE_THREADS / 32) + threadIdx.x / 32) * ROWS + int(lane / W), last = dims[0] - 1;
  const size_t from = size_t(min(row, last));  // rows past the end compute on the last one and store nothing
  const bool aligned = starts_at_16(x);
  Run<8, T> run[C];
  float v[C][8];
#pragma unroll
  for (int c = 0; c < C; c++) {
    run[c].load(x + from * D + 256 * c + 8 * octet, aligned);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      v[c][e] = run[c][e];
    }
  }
  bool nearer = false;
  if (CENTER) {
    const float* own = mean + from / size_t(dims[1]) * D;
    float off[C][8], with = 0, without = 0;
#pragma unroll
    for (int c = 0; c < C; c++) {
#pragma unroll
      for (int e = 0; e < 8; e++) {
        off[c][e] = v[c][e] - own[256 * c + 8 * octet + e];
        with = fmaf(v[c][e], v[c][e], with);
        without = fmaf(off[c][e], off[c][e], without);
      }
    }
    nearer = row_sum<W>(without) < row_sum<W>(with);
#pragma unroll
    for (int c = 0; c < C; c++) {
#pragma unroll
      for (int e = 0; e < 8; e++) {
        v[c][e] = nearer ? off[c][e] : v[c][e];
      }
    }
  }
  float largest = 0;
#pragma unroll
  for (int c = 0; c < C; c++) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      largest = fmaxf(largest, fabsf(v[c][e]));
    }
  }
  largest = encode_row_max<W>(largest);
  const bool coded = largest >= ENCODE_SMALLEST;
  const float inverse = coded ? 1.0f / largest : 0.0f;
  float squares = 0;
#pragma unroll
  for (int c = 0; c < C; c++) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      v[c][e] *= inverse;
      squares = fmaf(v[c][e], v[c][e], squares);
      v[c][e] *= signs[256 * c + 8 * octet + e];
    }
  }
  const float unit = sqrtf(row_sum<W>(squares) / float(D));
  hadamard_octets<D>(v, lane);
  const float factor = coded ? 1.0f / (unit * sqrtf(float(D))) : 0.0f;

  float yy = 0, yq = 0, qq = 0;
#pragma unroll
  for (int c = 0; c < C; c++) {
    uint64_t word1 = 0, word2 = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float y = v[c][e] * factor;
      const unsigned code = first(y);
      float q = first.point(code);
      word1 |= uint64_t(code) << (BITS1 * e);
      if (BITS2 > 0) {
        const unsigned next = second(y - q);
        q += second.point(next);
        word2 |= uint64_t(next) << (BITS2 * e);
      }
      yy = fmaf(y, y, yy);
      yq = fmaf(y, q, yq);
      qq = fmaf(q, q, qq);
    }
    if (row <= last) {
      encode_store<BITS1>(codes1 + (from * (D / 8) + 32 * c + octet) * BITS1, word1);
      if (BITS2 > 0) {
        encode_store<(BITS2 > 0 ? BITS2 : 1)>(codes2 + (from * (D / 8) + 32 * c + octet) * BITS2, word2);
      }
    }
  }
  float correction = 1;
  if (SCALE != ENCODE_NORM) {
    yq = row_sum<W>(yq);
    const float other = row_sum<W>(SCALE == ENCODE_LS ? qq : yy);
    const float over = SCALE == ENCODE_LS ? yq : other, under = SCALE == ENCODE_LS ? other : yq;
    correction = under > 0 ? over / under : 1.0f;
  }
  if (row <= last && octet == 0) {
    const uint16_t bits = encode_bfloat(coded ? largest * unit * correction : 0.0f);
    scales[from] = CENTER && !nearer ? bits ^ 0x8000u : bits;
  }
}

// Eight values to codes of a step and a zero, one of each or one each; all operations are those of MLX, one rounding each.
template <int BITS>
__device__ inline uint32_t encode_affine_code(float x, float step, float zero) {
  const float levels = float((1 << BITS) - 1);
  return step > 0 ? uint32_t(fminf(fmaxf(rintf(__fdiv_rn(__fsub_rn(x, zero), step)), 0.0f), levels)) : 0u;
}

// The step and zero of a group, as bits of bfloat16.
template <int BITS>
__device__ inline void encode_affine_sides(float low, float high, uint16_t& step, uint16_t& zero) {
  zero = encode_outward<false>(low);
  const float gap = __fsub_rn(high, __uint_as_float(uint32_t(zero) << 16));
  step = encode_outward<true>(__fdiv_rn(gap, float((1 << BITS) - 1)));
  step = __uint_as_float(uint32_t(step) << 16) >= ENCODE_SMALLEST ? step : uint16_t(0);
}

// Rows coded in groups of GROUP tokens of a channel: a thread has eight channels of a group. dims: heads, rows of one.
template <int D, int BITS, int GROUP, typename T>
__device__ inline void encode_affine_channels(
    const T* x, const int* dims, uint8_t* codes, uint16_t* steps, uint16_t* zeros) {
  const unsigned octets = D / 8, rows = unsigned(dims[1]), groups = (rows + GROUP - 1) / GROUP;
  const size_t thread_ = size_t(blockIdx.x) * ENCODE_THREADS + threadIdx.x;
  const unsigned octet = unsigned(thread_ % octets);
  const size_t place = thread_ / octets;  // of the group, in all heads
  if (place >= size_t(dims[0]) * groups) {
    return;
  }
  const unsigned first = unsigned(place % groups) * GROUP, count = min(unsigned(GROUP), rows - first);
  const size_t row = place / groups * rows + first;
  const bool aligned = starts_at_16(x);
  float low[8], high[8];
  for (unsigned j = 0; j < count; j++) {
    Run<8, T> run;
    run.load(x + (row + j) * D + 8 * octet, aligned);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      low[e] = j == 0 ? run[e] : fminf(low[e], run[e]);
      high[e] = j == 0 ? run[e] : fmaxf(high[e], run[e]);
    }
  }
  float step[8], zero[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    uint16_t bits[2];
    encode_affine_sides<BITS>(low[e], high[e], bits[0], bits[1]);
    steps[place * D + 8 * octet + e] = bits[0];
    zeros[place * D + 8 * octet + e] = bits[1];
    step[e] = __uint_as_float(uint32_t(bits[0]) << 16);
    zero[e] = __uint_as_float(uint32_t(bits[1]) << 16);
  }
  for (unsigned j = 0; j < count; j++) {
    Run<8, T> run;
    run.load(x + (row + j) * D + 8 * octet, aligned);
    uint64_t word = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      word |= uint64_t(encode_affine_code<BITS>(run[e], step[e], zero[e])) << (BITS * e);
    }
    encode_store<BITS>(codes + ((row + j) * octets + octet) * BITS, word);
  }
}

// Rows coded in groups of GROUP channels of a token, GROUP a multiple of 8: a thread has a group. dims: rows of all heads.
template <int D, int BITS, int GROUP, typename T>
__device__ inline void encode_affine_tokens(
    const T* x, const int* dims, uint8_t* codes, uint16_t* steps, uint16_t* zeros) {
  const size_t place = size_t(blockIdx.x) * ENCODE_THREADS + threadIdx.x;
  if (place >= size_t(dims[0]) * (D / GROUP)) {
    return;
  }
  const bool aligned = starts_at_16(x);
  Run<8, T> run[GROUP / 8];
  float low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < GROUP / 8; i++) {
    run[i].load(x + place * GROUP + 8 * i, aligned);
#pragma unroll
    for (int e = 0; e < 8; e++) {
      low = i + e == 0 ? run[i][e] : fminf(low, run[i][e]);
      high = i + e == 0 ? run[i][e] : fmaxf(high, run[i][e]);
    }
  }
  encode_affine_sides<BITS>(low, high, steps[place], zeros[place]);
  const float step = __uint_as_float(uint32_t(steps[place]) << 16), zero = __uint_as_float(uint32_t(zeros[place]) << 16);
#pragma unroll
  for (int i = 0; i < GROUP / 8; i++) {
    uint64_t word = 0;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      word |= uint64_t(encode_affine_code<BITS>(run[i][e], step, zero)) << (BITS * e);
    }
    encode_store<BITS>(codes + (place * (GROUP / 8) + i) * BITS, word);
  }
}

}  // namespace kvtool
