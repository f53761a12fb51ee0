// Flash-decoding for one query a head over 4-bit codes of 128 channels, on tensor cores: what keys and values share.
// Followed by decode_keys.cu, decode_values.cu and decode.cu; after attend.cu.
//
// A block of 8 warps owns up to 4 query heads of one KV head and one split of the keys; a warp takes every eighth step of 32 tokens.
// Both products are mma.m16n8k16 on halves with float32 sums: tokens or channels are the 16 rows, query heads the columns. Columns 0-3
// hold the high halves of the queries (of the weights), columns 4-7 what rounding left of them, so that both enter with 22 bits at no
// cost. Codes become halves
//   - through a table in shared memory of all pairs of entries: a byte of codes is one conflict-free load, as every lane has a copy, or
//   - for affine codes by shifting: a 4-bit number in the upper bits of a half's fraction is the subnormal code * 2^-18, exactly. Scales
//     go to the other factor, zeros to a sum of their own.
// Lane = 4 g + t holds rows g, g + 8 and columns 2t, 2t + 1 of a product. Row g of 8 is token place(g), so that loads are contiguous.
//
// `decode` returns false, before it writes any result, where codes are not aligned to 16 bytes, a table or a query is not finite, or a
// sequence is shorter than a step.

namespace kvtool {

constexpr int DECODE_DIM = 128;
constexpr int DECODE_WARPS = 8;
constexpr int DECODE_STEP = 32;
constexpr int DECODE_HEADS = 4;
constexpr int DECODE_TABLE = 65536;               // bytes: 256 pairs, 32 lanes, keys and values
constexpr int DECODE_CODES = 2048;                // bytes of a step's 4-bit codes
constexpr int DECODE_QUERY = 144;                 // floats of a query in shared memory: 4 runs of 32, padded to 36
constexpr float DECODE_SLACK = 6;                 // a score may pass the maximum by 2^6 before sums are rescaled
constexpr float DECODE_LIFT = 8;                  // weights are 2^8 times larger, further from the smallest half
constexpr float DECODE_CODE = 1.0f / (1 << 18);   // a code of 1 as a half

struct DecodeLane {
  int lane;
  int g;
  int t;
  int place;  // of row g among 8 tokens

  __device__ __forceinline__ explicit DecodeLane(int lane_)
      : lane(lane_), g(lane_ / 4), t(lane_ % 4), place(lane_ / 8 + lane_ / 4 % 2 * 4) {}
};

__device__ __forceinline__ void decode_mma(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += how many bits a and b have in common, 16 rows by 8 columns of 128 bits.
__device__ __forceinline__ void decode_count(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Codes of 4 bits, number `at` of each of two runs of four, as halves: in the upper bits of the fraction. A product aligns its terms by the
// exponents that halves are written with, which for a subnormal is -14, and cuts what is below: in the lowest bits of a half a code would
// lose 6 bits more, once weights differ.
__device__ __forceinline__ uint32_t decode_codes(uint32_t two, int at) {
  return (at < 2 ? two << (6 - 4 * at) : two >> (4 * at - 6)) & 0x03c003c0u;
}

// An 8 x 8 matrix of halves, a row in 4 lanes, transposed.
__device__ __forceinline__ uint32_t decode_transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Four 8 x 8 matrices of halves in shared memory, each by columns: lane 8 i + k names row k of matrix i.
__device__ __forceinline__ void decode_columns(uint32_t (&x)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// Start to copy 4, 8 or 16 bytes into shared memory; close a group of copies; wait for the group before the last one.
__device__ __forceinline__ void decode_copy(char* to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void decode_copy(uint2* to, const uint2* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void decode_copy(uint32_t* to, const uint32_t* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void decode_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void decode_wait() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
}

// Wait for all copies of this thread.
__device__ __forceinline__ void decode_arrived() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// Some warps of a block meet: `barrier` from 1 on.
__device__ __forceinline__ void decode_meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Bring what is there nearer.
__device__ __forceinline__ void decode_prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ __forceinline__ float decode_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as halves, rounded; what two halves leave of them; one or the other, as `rest` has no bits or all.
__device__ __forceinline__ uint32_t decode_near(float x, float y) {
  const __half2 near = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&near);
}
__device__ __forceinline__ uint32_t decode_left(float x, float y, uint32_t taken) {
  const float2 back = __half22float2(*reinterpret_cast<const __half2*>(&taken));
  return decode_near(x - back.x, y - back.y);
}
__device__ __forceinline__ uint32_t decode_halves(float x, float y, uint32_t rest) {
  return decode_left(x, y, decode_near(x, y) & rest);
}

// x y in halves: rounded, or what rounding leaves.
__device__ __forceinline__ uint32_t decode_product(uint32_t x_, uint32_t y_, uint32_t rest) {
  const __half2 x = *reinterpret_cast<const __half2*>(&x_);
  const __half2 y = *reinterpret_cast<const __half2*>(&y_);
  __half2 product = __hmul2(x, y);
  if (rest != 0) {
    product = __hfma2(x, y, __hneg2(product));
  }
  return *reinterpret_cast<const uint32_t*>(&product);
}

__device__ __forceinline__ uint32_t decode_add_product(uint32_t x, uint32_t y, uint32_t sum) {
  const __half2 z = __hfma2(
      *reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y), *reinterpret_cast<const __half2*>(&sum));
  return *reinterpret_cast<const uint32_t*>(&z);
}

// The power of two of a number's exponent and its inverse; both are normal numbers.
__device__ __forceinline__ void decode_unit(float largest, float& unit, float& inverse) {
  const int exponent = min(max(__float_as_int(largest) >> 23 & 255, 1), 253);
  unit = __int_as_float(exponent << 23);
  inverse = __int_as_float((254 - exponent) << 23);
}

__device__ __forceinline__ uint32_t decode_choose(uint32_t a, uint32_t b, uint32_t mask) {
  return (a & mask) | (b & ~mask);
}

constexpr __device__ __forceinline__ bool decode_is_half(__half) {
  return true;
}
template <typename T>
constexpr __device__ __forceinline__ bool decode_is_half(T) {
  return false;
}

__device__ __forceinline__ bool decode_aligned(const void* pointer) {
  return (reinterpret_cast<size_t>(pointer) & 15) == 0;
}

// How far on the token `ahead` of token j is, or the last one.
template <bool FULL>
__device__ __forceinline__ int decode_skip(int ahead, int j, int tokens) {
  return FULL ? ahead : min(ahead, tokens - 1 - j);
}

// The block's memory, by its name: then the address need not be kept in a register.
__device__ __forceinline__ char* decode_memory() {
  extern __shared__ uint4 shared_memory[];
  return reinterpret_cast<char*>(shared_memory);
}

// Shared memory by its 32-bit addresses.
__device__ __forceinline__ uint32_t decode_address(const char* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}
template <int OFFSET>
__device__ __forceinline__ uint32_t decode_load(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1 + %2];" : "=r"(word) : "r"(address), "n"(OFFSET));
  return word;
}

// The two entries that a byte of codes names, as halves. 256 bytes a pair: one word a lane, from byte AT on: 0, or 128 for a second table.
template <int AT>
__device__ __forceinline__ uint32_t decode_pair(uint32_t codes, uint32_t place, int byte) {
  return *reinterpret_cast<const uint32_t*>(decode_memory() + AT + __byte_perm(codes, place, 0x5504u + 16u * uint32_t(byte)));
}

// Fill one half of the table; `entry` is entry lane % 16. The largest entry becomes 1 to 2 times `unit`. False if one is not finite.
__device__ __forceinline__ bool decode_fill(char* table, float entry, int thread_, float& unit) {
  float largest = fabsf(entry);
  bool finite = isfinite(entry);
  ATTEND_UNROLL
  for (int offset = 8; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  float inverse;
  decode_unit(largest, unit, inverse);
  const float second = __shfl_sync(0xffffffffu, entry, thread_ / 16);
  const __half2 pair = __floats2half2_rn(entry * inverse, second * inverse);
  ATTEND_UNROLL
  for (int i = 0; i < 32; i++) {
    *reinterpret_cast<__half2*>(table + thread_ * 256 + (thread_ + i) % 32 * 4) = pair;
  }
  return finite;
}

// Queries of the block in shared memory, each over a power of two that makes it less than 1.
struct DecodeQueries {
  float* x;     // DECODE_HEADS * DECODE_QUERY
  float* unit;  // DECODE_HEADS

  static __device__ __forceinline__ int at(int head, int d) {
    return head * DECODE_QUERY + d / 32 * 36 + d % 32;
  }

  // Warp `head` brings its query; false if it is not finite.
  template <typename Q>
  __device__ __forceinline__ bool bring(const Q* row, int head, int lane) const {
    float value[4];
    float largest = 0;
    bool finite = true;
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      value[i] = float(row[32 * i + lane]);
      largest = fmaxf(largest, fabsf(value[i]));
      finite = finite && isfinite(value[i]);
    }
    ATTEND_UNROLL
    for (int offset = 16; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    float own;
    float inverse;
    decode_unit(largest, own, inverse);
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      x[at(head, 32 * i + lane)] = value[i] * (0.5f * inverse);
    }
    if (lane == 0) {
      unit[head] = 2 * own;
    }
    return finite;
  }
};

}  // namespace kvtool
