// Flash-decoding for one query a head over 4-bit codes of 128 channels, on tensor cores. Included after attend.cu.
//
// A block of 8 warps owns up to 4 query heads of one KV head and one split of the keys; a warp takes every eighth step of 32 tokens.
// Both products are mma.m16n8k16 on halves with float32 sums: tokens or channels are the 16 rows, query heads the columns. Columns 0-3
// hold the high halves of the queries (of the weights), columns 4-7 what rounding left of them, so that both enter with 22 bits at no
// cost. Codes become halves
//   - through a table in shared memory of all pairs of entries: a byte of codes is one conflict-free load, as every lane has a copy, or
//   - for affine codes by masking: a 4-bit number in the low bits of a half is the subnormal code * 2^-24, exactly; the next 4 bits, 16
//     times that. Scales go to the other factor, zeros to a sum of their own.
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
constexpr float DECODE_CODE = 1.0f / (1 << 24);   // a code of 1 as a half

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

// Start to copy 8 or 16 bytes into shared memory; close a group of copies; wait for the group before the last one.
__device__ __forceinline__ void decode_copy(char* to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void decode_copy(uint2* to, const uint2* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void decode_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void decode_wait() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncwarp();
}

__device__ __forceinline__ float decode_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as halves: rounded (`rest` has no bits), or what rounding leaves (all bits).
__device__ __forceinline__ uint32_t decode_halves(float x, float y, uint32_t rest) {
  __half2 near = __floats2half2_rn(x, y);
  const uint32_t taken = *reinterpret_cast<const uint32_t*>(&near) & rest;
  const float2 back = __half22float2(*reinterpret_cast<const __half2*>(&taken));
  near = __floats2half2_rn(x - back.x, y - back.y);
  return *reinterpret_cast<const uint32_t*>(&near);
}

// x y in halves: rounded, or what rounding leaves.
__device__ __forceinline__ uint32_t decode_product(uint32_t x_, uint32_t y_, uint32_t rest) {
  const __half2 x = *reinterpret_cast<const __half2*>(&x_);
  const __half2 y = *reinterpret_cast<const __half2*>(&y_);
  const __half2 near = __hmul2(x, y);
  const uint32_t taken = *reinterpret_cast<const uint32_t*>(&near) & rest;
  const __half2 left = __hfma2(x, y, __hneg2(*reinterpret_cast<const __half2*>(&taken)));
  return *reinterpret_cast<const uint32_t*>(&left);
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
  // `odd`: factor of odd channels.
  template <typename Q>
  __device__ __forceinline__ bool bring(const Q* row, int head, int lane, float odd) const {
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
      x[at(head, 32 * i + lane)] = value[i] * (0.5f * inverse) * (lane % 2 ? odd : 1.0f);
    }
    if (lane == 0) {
      unit[head] = 2 * own;
    }
    return finite;
  }
};

// Keys of two 2-bit codes a channel: centroids1[c1] + centroids2[c2].
struct DecodeTwoStageKeys {
  static constexpr bool SHIFTS = true;

  const void* codes1;
  const void* codes2;
  const float* centroids1;
  const float* centroids2;
  uint32_t query[16];
  float unit;
  uint2* slot;  // this lane's codes in shared memory, 32 lanes apart

  __device__ __forceinline__ bool place(char* memory, int thread_) {
    slot = reinterpret_cast<uint2*>(memory + DECODE_TABLE + thread_ / 32 * DECODE_CODES) + thread_ % 32;
    return decode_aligned(codes1) && decode_aligned(codes2);
  }

  template <typename Q>
  __device__ __forceinline__ bool prepare(char* memory, DecodeQueries queries, const Q* row, int thread_) {
    const int lane = thread_ % 32;
    const bool sound = decode_fill(memory, centroids1[lane & 3] + centroids2[lane >> 2 & 3], thread_, unit);
    return (thread_ >= 32 * DECODE_HEADS || queries.bring(row, thread_ / 32, lane, 1.0f)) && sound;
  }

  __device__ __forceinline__ void begin(DecodeQueries queries, DecodeLane at) {
    const float* x = queries.x + DecodeQueries::at(at.g % 4, 32 * at.t);
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      query[2 * i] = decode_halves(x[4 * i], x[4 * i + 2], at.g >= 4 ? 0xffffffffu : 0u);
      query[2 * i + 1] = decode_halves(x[4 * i + 1], x[4 * i + 3], at.g >= 4 ? 0xffffffffu : 0u);
    }
  }

  // Factor of a head's products.
  __device__ __forceinline__ float factor(DecodeQueries queries, int head) const {
    return queries.unit[head] * unit;
  }

  template <bool FULL>
  __device__ __forceinline__ void load(size_t row, int head, int base, int tokens, DecodeLane at) {
    const size_t from = (row + base + at.place) * 4 + at.t;
    const uint2* from1 = static_cast<const uint2*>(codes1) + from;
    const uint2* from2 = static_cast<const uint2*>(codes2) + from;
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      const int skip = decode_skip<FULL>(8 * r, base + at.place, tokens);
      decode_copy(slot + 32 * r, from1 + 4 * skip);
      decode_copy(slot + 128 + 32 * r, from2 + 4 * skip);
    }
  }

  __device__ __forceinline__ void dots(float (&s)[4][2], DecodeLane at, DecodeQueries) const {
    constexpr uint32_t LOW = 0x33333333u;
    const uint32_t place = uint32_t(at.lane) * 4;
    decode_wait();
    const uint2 a[4] = {slot[0], slot[32], slot[64], slot[96]};
    const uint2 b[4] = {slot[128], slot[160], slot[192], slot[224]};
    float c[2][4] = {};
    ATTEND_UNROLL
    for (int w = 0; w < 2; w++) {
      uint32_t even[4];
      uint32_t odd[4];
      ATTEND_UNROLL
      for (int r = 0; r < 4; r++) {
        const uint32_t one = w ? a[r].y : a[r].x;
        const uint32_t two = w ? b[r].y : b[r].x;
        even[r] = decode_choose(one, two << 2, LOW);
        odd[r] = decode_choose(one >> 2, two, LOW);
      }
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        ATTEND_UNROLL
        for (int tile = 0; tile < 2; tile++) {
          decode_mma(
              c[tile], decode_pair<0>(even[2 * tile], place, i), decode_pair<0>(even[2 * tile + 1], place, i),
              decode_pair<0>(odd[2 * tile], place, i), decode_pair<0>(odd[2 * tile + 1], place, i), query[8 * w + 2 * i],
              query[8 * w + 2 * i + 1]);
        }
      }
    }
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      s[r][0] = c[r / 2][r % 2 * 2];
      s[r][1] = c[r / 2][r % 2 * 2 + 1];
    }
  }
};

// Keys of signs: D - 2 hamming. A lane has half of the channels, as the columns of the other keys have half of a query's bits.
struct DecodeSignKeys {
  static constexpr bool SHIFTS = true;

  const uint8_t* bits;
  uint2 a[4];
  uint2 sign[2];

  __device__ __forceinline__ bool place(char*, int) {
    return decode_aligned(bits);
  }

  template <typename Q>
  __device__ __forceinline__ bool prepare(char*, DecodeQueries queries, const Q* row, int thread_) {
    if (thread_ < 32 * DECODE_HEADS) {
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        const uint32_t word = __ballot_sync(0xffffffffu, float(row[32 * i + thread_ % 32]) >= 0);
        if (thread_ % 32 == 0) {
          queries.x[thread_ / 32 * 4 + i] = __uint_as_float(word);
        }
      }
    }
    return true;
  }

  __device__ __forceinline__ void begin(DecodeQueries queries, DecodeLane at) {
    ATTEND_UNROLL
    for (int x = 0; x < 2; x++) {
      const float* word = queries.x + (at.t % 2 * 2 + x) * 4 + at.t / 2 * 2;
      sign[x] = make_uint2(__float_as_uint(word[0]), __float_as_uint(word[1]));
    }
  }

  __device__ __forceinline__ float factor(DecodeQueries, int) const {
    return 1;
  }

  template <bool FULL>
  __device__ __forceinline__ void load(size_t row, int head, int base, int tokens, DecodeLane at) {
    const uint2* from = reinterpret_cast<const uint2*>(bits) + (row + base + at.place) * 2 + at.t / 2;
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      a[r] = __ldg(from + 2 * decode_skip<FULL>(8 * r, base + at.place, tokens));
    }
  }

  __device__ __forceinline__ void dots(float (&s)[4][2], DecodeLane, DecodeQueries) const {
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      ATTEND_UNROLL
      for (int x = 0; x < 2; x++) {
        s[r][x] = float(DECODE_DIM / 2 - 2 * int(__popc(a[r].x ^ sign[x].x) + __popc(a[r].y ^ sign[x].y)));
      }
    }
  }
};

// Keys code * scale + zero, scales and zeros of GROUP tokens a channel, GROUP a multiple of a step: the query takes the scales, and zeros
// are keys of their own, the same in every row. Two channels 4 apart make a pair, as they do in a word of codes; odd ones are 16 times
// too large as codes, so that their queries are 16 times too small.
template <int GROUP, typename A>
struct DecodeAffineKeys {
  static constexpr bool SHIFTS = false;                 // a step of keys has one group
  static constexpr bool HALF = decode_is_half(A());
  static constexpr int RUN = 64;                        // bytes of a lane's scales
  static constexpr int SIDES = 8 * (RUN + 16);          // of a step's scales and zeros in shared memory: other runs, other banks
  static constexpr int CODES = DECODE_STEP * DECODE_DIM / 2;
  static constexpr int BYTES = SIDES + CODES + 2048;  // and codes; and the lanes' queries, for which there are no registers

  const void* codes;
  const A* scales;
  const A* zeros;
  char* memory;  // this warp's

  __device__ __forceinline__ bool place(char* all, int thread_) {
    memory = all + thread_ / 32 * BYTES;
    return decode_aligned(codes) && decode_aligned(scales) && decode_aligned(zeros);
  }

  template <typename Q>
  __device__ __forceinline__ bool prepare(char*, DecodeQueries queries, const Q* row, int thread_) {
    return thread_ >= 32 * DECODE_HEADS || queries.bring(row, thread_ / 32, thread_ % 32, 0.0625f);
  }

  __device__ __forceinline__ void begin(DecodeQueries queries, DecodeLane at) {
    const float* x = queries.x + DecodeQueries::at(at.g % 4, 32 * at.t);
    ATTEND_UNROLL
    for (int w = 0; w < 4; w++) {
      const float* y = x + 8 * w;
      reinterpret_cast<uint4*>(memory + SIDES + CODES)[32 * w + at.lane] = make_uint4(
          decode_halves(y[0], y[4], 0), decode_halves(y[1], y[5], 0), decode_halves(y[2], y[6], 0), decode_halves(y[3], y[7], 0));
    }
  }

  __device__ __forceinline__ float factor(DecodeQueries queries, int head) const {
    return queries.unit[head];
  }

  template <bool FULL>
  __device__ __forceinline__ void load(size_t row, int head, int base, int tokens, DecodeLane at) {
    const char* from = static_cast<const char*>(codes) + (row + base + at.place) * 64 + at.t * 16;
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      decode_copy(memory + SIDES + (32 * r + at.lane) * 16, from + 64 * decode_skip<FULL>(8 * r, base + at.place, tokens));
    }
    const size_t group = size_t(head) * ((tokens - 1) / GROUP + 1) + base / GROUP;
    const char* side = reinterpret_cast<const char*>(at.lane < 16 ? scales : zeros) + group * (4 * RUN) + at.lane % 16 * 16;
    decode_copy(memory + at.lane * 16 + at.lane / 4 * 16, side);
  }

  // Two values as halves over a power of two.
  static __device__ __forceinline__ uint32_t halves(uint32_t pair, float inverse) {
    return HALF ? pair : decode_halves(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xffff0000u) * inverse, 0);
  }

  static __device__ __forceinline__ void units(const uint4* side, float& unit, float& inverse) {
    unit = inverse = 1;
    if (!HALF) {
      float largest = 0;
      ATTEND_UNROLL
      for (int i = 0; i < 16; i++) {
        const uint32_t pair = reinterpret_cast<const uint32_t*>(side)[i];
        largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000u))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      decode_unit(largest, unit, inverse);
    }
  }

  __device__ __forceinline__ void dots(float (&s)[4][2], DecodeLane at, DecodeQueries) const {
    decode_wait();
    const uint4* scale = reinterpret_cast<const uint4*>(memory + at.t * (RUN + 16));
    const uint4* zero = reinterpret_cast<const uint4*>(memory + (at.t + 4) * (RUN + 16));
    const uint4* code = reinterpret_cast<const uint4*>(memory + SIDES) + at.lane;
    const uint4* query = reinterpret_cast<const uint4*>(memory + SIDES + CODES) + at.lane;
    const uint32_t rest = at.g >= 4 ? 0xffffffffu : 0u;
    float unit[2];
    float inverse[2];
    units(scale, unit[0], inverse[0]);
    units(zero, unit[1], inverse[1]);
    const uint4 a[4] = {code[0], code[32], code[64], code[96]};
    float even[4] = {};
    float odd[4] = {};
    float c[2][4] = {};
    ATTEND_UNROLL
    for (int w = 0; w < 4; w++) {
      const uint4 x4 = query[32 * w];
      const uint4 y4 = scale[w];
      const uint4 z4 = zero[w];
      ATTEND_UNROLL
      for (int u = 0; u < 2; u++) {
        const uint32_t x0 = u ? x4.z : x4.x;
        const uint32_t x1 = u ? x4.w : x4.y;
        const uint32_t y0 = u ? y4.y : y4.x;
        const uint32_t y1 = u ? y4.w : y4.z;
        const uint32_t z0 = u ? z4.y : z4.x;
        const uint32_t z1 = u ? z4.w : z4.z;
        const uint32_t b0 = decode_product(x0, halves(__byte_perm(y0, y1, 0x5410), inverse[0]), rest);
        const uint32_t b1 = decode_product(x1, halves(__byte_perm(y0, y1, 0x7632), inverse[0]), rest);
        const uint32_t even0 = halves(__byte_perm(z0, z1, 0x5410), inverse[1]);
        const uint32_t odd0 = halves(__byte_perm(z0, z1, 0x7632), inverse[1]);
        decode_mma(even, even0, even0, 0, 0, x0, x1);
        decode_mma(odd, 0, 0, odd0, odd0, x0, x1);
        ATTEND_UNROLL
        for (int tile = 0; tile < 2; tile++) {
          const uint32_t one = (w == 0 ? a[2 * tile].x : w == 1 ? a[2 * tile].y : w == 2 ? a[2 * tile].z : a[2 * tile].w) >> (8 * u);
          const uint4& next = a[2 * tile + 1];
          const uint32_t two = (w == 0 ? next.x : w == 1 ? next.y : w == 2 ? next.z : next.w) >> (8 * u);
          decode_mma(c[tile], one & 0x000f000fu, two & 0x000f000fu, one & 0x00f000f0u, two & 0x00f000f0u, b0, b1);
        }
      }
    }
    ATTEND_UNROLL
    for (int column = 0; column < 2; column++) {
      // Half of it: both halves of the columns have it, and are summed.
      const float constant = fmaf(16.0f, odd[column], even[column]) * (0.5f * unit[1]);
      ATTEND_UNROLL
      for (int r = 0; r < 4; r++) {
        s[r][column] = fmaf(c[r / 2][r % 2 * 2 + column], unit[0] / DECODE_CODE, constant);
      }
    }
    __syncwarp();
  }
};

// The running softmax of a warp: lane's columns are heads 2 (t % 2) and the next. Sums of values are over `unit`.
struct DecodeState {
  float m[2];
  float l[2];
  float o[8][4];
  float zero[2][2];  // sums of zeros, affine values: of channel groups 2 (t / 2) and the next
  float unit;
  float inverse;
  float cap;  // factors of values up to here keep weights within a half

  __device__ __forceinline__ void clear() {
    ATTEND_UNROLL
    for (int x = 0; x < 2; x++) {
      m[x] = -ATTEND_INF;
      l[x] = 0;
      zero[x][0] = zero[x][1] = 0;
    }
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
    }
    unit = inverse = 1;
    cap = 0;
  }

  __device__ __forceinline__ void scale(float first, float second) {
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      o[i][0] *= first;
      o[i][1] *= second;
      o[i][2] *= first;
      o[i][3] *= second;
    }
  }

  // Scores in log2, -inf where not visible, become weights.
  __device__ __forceinline__ void weigh(float (&s)[4][2]) {
    float top[2];
    ATTEND_UNROLL
    for (int x = 0; x < 2; x++) {
      top[x] = fmaxf(fmaxf(s[0][x], s[1][x]), fmaxf(s[2][x], s[3][x]));
    }
    if (__any_sync(0xffffffffu, top[0] > m[0] + DECODE_SLACK || top[1] > m[1] + DECODE_SLACK)) {
      float keep[2];
      ATTEND_UNROLL
      for (int x = 0; x < 2; x++) {
        ATTEND_UNROLL
        for (int offset = 4; offset < 32; offset *= 2) {
          top[x] = fmaxf(top[x], __shfl_xor_sync(0xffffffffu, top[x], offset));
        }
        top[x] = fmaxf(top[x], m[x]);
        keep[x] = attend_factor(m[x], top[x]);
        m[x] = top[x];
        l[x] *= keep[x];
        zero[x][0] *= keep[x];
        zero[x][1] *= keep[x];
      }
      scale(keep[0], keep[1]);
    }
    ATTEND_UNROLL
    for (int x = 0; x < 2; x++) {
      const float base = m[x] == -ATTEND_INF ? 0.0f : m[x] - DECODE_LIFT;
      ATTEND_UNROLL
      for (int r = 0; r < 4; r++) {
        s[r][x] = decode_exp2(s[r][x] - base);
        l[x] += s[r][x];
      }
    }
  }

  // Make room for the factors of a step's values, the largest of them in each lane; true if one is not finite.
  __device__ __forceinline__ bool admit(float factor) {
    if (!__any_sync(0xffffffffu, !(factor <= cap))) {
      return false;
    }
    const bool odd = __any_sync(0xffffffffu, !isfinite(factor));
    float largest = isfinite(factor) ? factor : 0.0f;
    ATTEND_UNROLL
    for (int offset = 16; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    if (largest > cap) {
      const float before = unit;
      decode_unit(largest, unit, inverse);
      scale(before * inverse, before * inverse);
      cap = 2 * unit;
    }
    return odd;
  }
};

// Values of one 4-bit code a channel: table[code].
template <int AT, bool SCALED, typename S>
struct DecodeTableValues {
  static constexpr int CHANNELS = 2;  // o[i][0] and o[i][2] are channels 16 g + 2 i and the next

  const void* codes;
  const float* entries;
  int count;
  const S* scales;
  S scale;
  uint2* slot;  // this lane's codes in shared memory, 32 lanes apart
  float unit;

  __device__ __forceinline__ bool place(char* memory, int thread_) {
    slot = reinterpret_cast<uint2*>(memory + thread_ / 32 * DECODE_CODES) + thread_ % 32;
    return decode_aligned(codes);
  }

  __device__ __forceinline__ bool prepare(char*, int thread_) {
    return decode_fill(decode_memory() + AT, entries[min(thread_ % 16, count - 1)], thread_, unit);
  }

  template <bool FULL>
  __device__ __forceinline__ void load(size_t row, int head, int base, int tokens, DecodeLane at) {
    const uint2* from = static_cast<const uint2*>(codes) + (row + base + at.t) * 8 + at.g;
    ATTEND_UNROLL
    for (int u = 0; u < 8; u++) {
      decode_copy(slot + 32 * u, from + 8 * decode_skip<FULL>(4 * u, base + at.t, tokens));
    }
    if (SCALED) {
      scale = scales[row + (FULL ? base + at.lane : min(base + at.lane, tokens - 1))];
    }
  }

  __device__ __forceinline__ void add(DecodeState& state, const float (&p)[4][2], bool in, DecodeLane at) {
    constexpr uint32_t LOW = 0x0f0f0f0fu;
    const uint32_t place = uint32_t(at.lane) * 4;
    float own = 1;
    bool odd = false;
    if (SCALED) {
      own = in ? float(scale) : 0.0f;
      odd = state.admit(fabsf(own));
      own *= state.inverse;
    }
    const uint32_t rest = at.t >= 2 ? 0xffffffffu : 0u;
    const uint32_t keep = odd ? ~rest : 0xffffffffu;  // inf - inf is no rest
    uint32_t b[4];
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      const float factor = SCALED ? __shfl_sync(0xffffffffu, own, at.place + 8 * r) : 1.0f;
      b[r] = decode_transpose(decode_halves(p[r][0] * factor, p[r][1] * factor, rest) & keep);
    }
    decode_wait();
    ATTEND_UNROLL
    for (int tile = 0; tile < 2; tile++) {
      const uint2* from = slot + 128 * tile;
      const uint2 a[4] = {from[0], from[32], from[64], from[96]};
      ATTEND_UNROLL
      for (int w = 0; w < 2; w++) {
        uint32_t word[4];
        ATTEND_UNROLL
        for (int u = 0; u < 4; u++) {
          word[u] = w ? a[u].y : a[u].x;
        }
        const uint32_t even0 = decode_choose(word[0], word[1] << 4, LOW);
        const uint32_t odd0 = decode_choose(word[0] >> 4, word[1], LOW);
        const uint32_t even1 = decode_choose(word[2], word[3] << 4, LOW);
        const uint32_t odd1 = decode_choose(word[2] >> 4, word[3], LOW);
        ATTEND_UNROLL
        for (int i = 0; i < 4; i++) {
          decode_mma(
              state.o[4 * w + i], decode_pair<AT>(even0, place, i), decode_pair<AT>(odd0, place, i),
              decode_pair<AT>(even1, place, i), decode_pair<AT>(odd1, place, i), b[2 * tile], b[2 * tile + 1]);
        }
      }
    }
  }

  static __device__ __forceinline__ int channel(int i, DecodeLane at) {
    return 16 * at.g + 2 * i;
  }

  __device__ __forceinline__ float factor(bool) const {
    return unit;
  }
};

template <int AT, bool SCALED, typename S>
__device__ __forceinline__ DecodeTableValues<AT, SCALED, S> decode_table_values(
    const void* codes, const float* entries, int count, const S* scales) {
  return DecodeTableValues<AT, SCALED, S>{codes, entries, count, scales};
}

// Values code * scale + zero, scales and zeros of GROUP channels a token, GROUP 32, 64 or 128: the weights take the scales.
template <int GROUP, typename A>
struct DecodeAffineValues {
  static constexpr int GROUPS = DECODE_DIM / GROUP;
  static constexpr int CODES = DECODE_STEP * DECODE_DIM / 2;
  static constexpr int BYTES = CODES + DECODE_STEP * 32;  // of a step's codes, scales (pairs of a half) and zeros in shared memory

  struct alignas(GROUPS * sizeof(A)) Side {
    A x[GROUPS];
  };

  const void* codes;
  const A* scales;
  const A* zeros;
  Side scale;
  Side zero;
  char* memory;  // this warp's

  __device__ __forceinline__ bool place(char* all, int thread_) {
    memory = all + thread_ / 32 * BYTES;
    return decode_aligned(codes) && decode_aligned(scales) && decode_aligned(zeros);
  }

  __device__ __forceinline__ bool prepare(char*, int) {
    return true;
  }

  // Rows of 64 bytes; 16-byte pieces change places so that 8 rows of one piece are in different banks.
  static __device__ __forceinline__ int piece(int token, int i) {
    return token * 64 + (i ^ (token / 2 % 4)) * 16;
  }

  template <bool FULL>
  __device__ __forceinline__ void load(size_t row, int, int base, int tokens, DecodeLane at) {
    const char* from = static_cast<const char*>(codes) + (row + base + at.g) * 64 + at.t * 16;
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      decode_copy(memory + piece(at.g + 8 * r, at.t), from + 64 * decode_skip<FULL>(8 * r, base + at.g, tokens));
    }
    const size_t token = row + (FULL ? base + at.lane : min(base + at.lane, tokens - 1));
    scale = reinterpret_cast<const Side*>(scales)[token];
    zero = reinterpret_cast<const Side*>(zeros)[token];
  }

  __device__ __forceinline__ void add(DecodeState& state, const float (&p)[4][2], bool in, DecodeLane at) {
    float largest = 0;
    bool lost = false;  // fmaxf drops a NaN
    float side[8];
    ATTEND_UNROLL
    for (int c = 0; c < 4; c++) {
      side[c] = in ? float(scale.x[c * GROUPS / 4]) : 0.0f;
      side[4 + c] = in ? float(zero.x[c * GROUPS / 4]) : 0.0f;
      largest = fmaxf(largest, fabsf(side[c]));
      lost = lost || isnan(side[c]);
    }
    const bool odd = state.admit(lost ? ATTEND_INF : largest);
    uint4* sides = reinterpret_cast<uint4*>(memory + CODES);
    uint32_t pair[4];
    ATTEND_UNROLL
    for (int c = 0; c < 4; c++) {
      pair[c] = decode_halves(side[c] * state.inverse, side[c] * state.inverse, 0);
    }
    sides[2 * at.lane] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    *reinterpret_cast<float4*>(sides + 2 * at.lane + 1) = make_float4(side[4], side[5], side[6], side[7]);
    decode_wait();
    const uint32_t rest = at.t >= 2 ? 0xffffffffu : 0u;
    const uint32_t keep = odd ? ~rest : 0xffffffffu;  // inf - inf is no rest
    ATTEND_UNROLL
    for (int tile = 0; tile < 2; tile++) {
      uint32_t b[4][2];
      ATTEND_UNROLL
      for (int k = 0; k < 2; k++) {
        const int r = 2 * tile + k;
        const uint4 y = sides[2 * (at.place + 8 * r)];
        const float2 z = *(reinterpret_cast<const float2*>(sides + 2 * (at.place + 8 * r) + 1) + at.t / 2);
        const uint32_t factor[4] = {y.x, y.y, y.z, y.w};
        const uint32_t near = decode_halves(p[r][0], p[r][1], 0);
        const uint32_t far = decode_halves(p[r][0], p[r][1], 0xffffffffu) & rest;
        ATTEND_UNROLL
        for (int c = 0; c < 4; c++) {
          const uint32_t weight = decode_product(near, factor[c], rest);
          b[c][k] = decode_transpose((odd ? weight : decode_add_product(far, factor[c], weight)) & keep);
        }
        ATTEND_UNROLL
        for (int x = 0; x < 2; x++) {
          state.zero[x][0] = fmaf(p[r][x], z.x, state.zero[x][0]);
          state.zero[x][1] = fmaf(p[r][x], z.y, state.zero[x][1]);
        }
      }
      ATTEND_UNROLL
      for (int half = 0; half < 2; half++) {
        // Matrices of 8 tokens by 32 channels.
        const int i = at.lane / 8;
        const int row = at.lane % 8;
        uint32_t x[4];
        decode_columns(x, memory + piece(16 * tile + i % 2 * 8 + row / 2 + row % 2 * 4, 2 * half + i / 2));
        ATTEND_UNROLL
        for (int j = 0; j < 2; j++) {
          const int c = 2 * half + j;
          ATTEND_UNROLL
          for (int u = 0; u < 2; u++) {
            const uint32_t one = x[2 * j] >> (8 * u);
            const uint32_t two = x[2 * j + 1] >> (8 * u);
            decode_mma(
                state.o[2 * c + u], one & 0x000f000fu, one & 0x00f000f0u, two & 0x000f000fu, two & 0x00f000f0u, b[c][0], b[c][1]);
          }
        }
      }
    }
    __syncwarp();
  }

  static __device__ __forceinline__ int channel(int i, DecodeLane at) {
    return i / 2 * 32 + 4 * at.g + i % 2 * 2;
  }

  __device__ __forceinline__ float factor(bool second) const {
    return (second ? 0.0625f : 1.0f) / DECODE_CODE;
  }
};

template <int RB, bool NORM, bool BIAS, bool ZEROS, typename Keys, typename Values, typename Q, typename N, typename C, typename O>
__device__ __forceinline__ bool decode(
    const Q* q,
    const float* q_scale,
    const int* dims,
    const int* start,
    const N* k_norm,
    const C* k_bias,
    O* out,
    float* lse,
    Keys keys,
    Values values,
    char* memory,     // of the tables or of the warps; at least 18 KiB
    char* warps,      // of the values, where they have no table
    char* queries_at  // DECODE_HEADS * (DECODE_QUERY + 1) floats
) {
  const int thread_ = int(threadIdx.x);
  const int warp = thread_ / 32;
  const DecodeLane at(thread_ % 32);
  const int heads = dims[ATTEND_GROUP];
  const int tokens = dims[ATTEND_KEYS];
  const int splits = int(gridDim.y);
  const int blocks = (heads + RB - 1) / RB;
  const int block = int(blockIdx.x) % blocks;
  const int head = int(blockIdx.x) / blocks;  // of batch * H_kv
  const size_t query0 = size_t(head) * heads + block * RB;
  const int count = min(RB, heads - block * RB);
  int low;
  int high;
  attend_range(dims, start, head / dims[ATTEND_HEADS], 0, low, high);

  const DecodeQueries queries{reinterpret_cast<float*>(queries_at), reinterpret_cast<float*>(queries_at) + DECODE_HEADS * DECODE_QUERY};
  const int first = low / DECODE_STEP;
  const int steps = max((high + DECODE_STEP - 1) / DECODE_STEP - first, 0);
  const int each = (steps + splits - 1) / splits;
  const int stop = first + min(each * (int(blockIdx.y) + 1), steps);
  int step = first + each * int(blockIdx.y) + warp;
  const size_t row = size_t(head) * tokens;
  N norm{};
  C bias{};
  if (Keys::SHIFTS && tokens < DECODE_STEP) {
    return false;
  }

  if (!(keys.place(memory, thread_) && values.place(warps, thread_))) {
    return false;
  }
  // The last step is read from further left if it must be: what it repeats is masked.
  const auto begin = [&](int base) { return Keys::SHIFTS ? min(base, tokens - DECODE_STEP) : base; };
  const auto load_keys = [&](int step_) {
    const int base = begin(step_ * DECODE_STEP);
    if (Keys::SHIFTS || base + DECODE_STEP <= tokens) {
      keys.template load<true>(row, head, base, tokens, at);
    } else {
      keys.template load<false>(row, head, base, tokens, at);
    }
    const size_t own = row + (Keys::SHIFTS ? base + at.lane : min(base + at.lane, tokens - 1));
    if (NORM) {
      norm = k_norm[own];
    }
    if (BIAS) {
      bias = k_bias[own];
    }
  };
  const auto load_values = [&](int step_) {
    const int base = begin(step_ * DECODE_STEP);
    if (Keys::SHIFTS || base + DECODE_STEP <= tokens) {
      values.template load<true>(row, head, base, tokens, at);
    } else {
      values.template load<false>(row, head, base, tokens, at);
    }
  };
  if (step < stop) {
    load_keys(step);
    decode_commit();
    load_values(step);
    decode_commit();
  }
  bool sound = keys.prepare(memory, queries, q + (query0 + min(warp, count - 1)) * DECODE_DIM, thread_);
  sound = values.prepare(warps, thread_) && sound;
  if (!__syncthreads_and(sound)) {
    decode_commit();
    decode_wait();  // no copy may arrive later
    __syncthreads();
    return false;
  }
  keys.begin(queries, at);
  float factor[2];
  ATTEND_UNROLL
  for (int x = 0; x < 2; x++) {
    const int own = at.t % 2 * 2 + x;
    factor[x] = q_scale[dims[ATTEND_PER_ROW] ? query0 + min(own, count - 1) : 0] * ATTEND_LOG2E * keys.factor(queries, own);
  }
  DecodeState state;
  state.clear();

  for (; step < stop; step += DECODE_WARPS) {
    const int base = begin(step * DECODE_STEP);
    const int from = max(low, step * DECODE_STEP);
    const bool more = step + DECODE_WARPS < stop;
    float s[4][2];
    keys.dots(s, at, queries);
    const float norms = NORM ? float(norm) : 1.0f;
    const float biases = BIAS ? float(bias) * ATTEND_LOG2E : 0.0f;
    if (more) {
      load_keys(step + DECODE_WARPS);
    }
    decode_commit();  // empty groups, too: each wait is for all but the last one
    const bool whole = base >= from && base + DECODE_STEP <= high;
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      const float own = NORM ? __shfl_sync(0xffffffffu, norms, at.place + 8 * r) : 1.0f;
      const float add = BIAS ? __shfl_sync(0xffffffffu, biases, at.place + 8 * r) : 0.0f;
      ATTEND_UNROLL
      for (int x = 0; x < 2; x++) {
        const float sum = s[r][x] + __shfl_xor_sync(0xffffffffu, s[r][x], 2);
        s[r][x] = sum * factor[x] * own + add;
      }
      if (!whole) {
        const int j = base + at.place + 8 * r;
        if (j < from || j >= high) {
          s[r][0] = s[r][1] = -ATTEND_INF;
        }
      }
    }
    state.weigh(s);
    values.add(state, s, base + at.lane >= from && base + at.lane < high, at);
    if (more) {
      load_values(step + DECODE_WARPS);
    }
    decode_commit();
  }

  // Merge the warps: (m, l), the sums of zeros, and (warp, head, channel) sums.
  __syncthreads();
  float* pool = reinterpret_cast<float*>(memory);
  float* ends = pool + DECODE_WARPS * DECODE_HEADS * DECODE_DIM;
  float* zeros = ends + DECODE_WARPS * DECODE_HEADS * 2;
  ATTEND_UNROLL
  for (int x = 0; x < 2; x++) {
    const int own = warp * DECODE_HEADS + at.t % 2 * 2 + x;
    ATTEND_UNROLL
    for (int offset = 4; offset < 32; offset *= 2) {
      state.l[x] += __shfl_xor_sync(0xffffffffu, state.l[x], offset);
      if (ZEROS) {
        state.zero[x][0] += __shfl_xor_sync(0xffffffffu, state.zero[x][0], offset);
        state.zero[x][1] += __shfl_xor_sync(0xffffffffu, state.zero[x][1], offset);
      }
    }
    if (at.g == 0) {
      if (at.t < 2) {
        ends[2 * own] = state.m[x];
        ends[2 * own + 1] = state.l[x];
      }
      if (ZEROS) {
        zeros[4 * own + at.t / 2 * 2] = state.zero[x][0];
        zeros[4 * own + at.t / 2 * 2 + 1] = state.zero[x][1];
      }
    }
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      float pair[2];
      ATTEND_UNROLL
      for (int k = 0; k < 2; k++) {
        const float sum = state.o[i][2 * k + x];
        pair[k] = (sum + __shfl_xor_sync(0xffffffffu, sum, 2)) * values.factor(k == 1) * state.unit;
      }
      if (at.t < 2) {
        *reinterpret_cast<float2*>(pool + own * DECODE_DIM + Values::channel(i, at)) = make_float2(pair[0], pair[1]);
      }
    }
  }
  __syncthreads();
  const int own = thread_ / 64;
  if (own >= count) {
    return true;
  }
  const int d = thread_ % 64 * 2;
  float top = -ATTEND_INF;
  ATTEND_UNROLL
  for (int w = 0; w < DECODE_WARPS; w++) {
    top = fmaxf(top, ends[2 * (w * DECODE_HEADS + own)]);
  }
  float total = 0;
  float2 sum = make_float2(0, 0);
  ATTEND_UNROLL
  for (int w = 0; w < DECODE_WARPS; w++) {
    const int from = w * DECODE_HEADS + own;
    const float weight = attend_factor(ends[2 * from], top);
    const float2 part = *reinterpret_cast<const float2*>(pool + from * DECODE_DIM + d);
    const float zero = ZEROS ? zeros[4 * from + d / 32] : 0.0f;
    total += weight * ends[2 * from + 1];
    sum.x += weight * (part.x + zero);
    sum.y += weight * (part.y + zero);
  }
  const bool none = total == 0;
  const size_t index = (query0 + own) * splits + blockIdx.y;
  if (d == 0) {
    lse[index] = none ? -ATTEND_INF : (top - DECODE_LIFT) * ATTEND_LN2 + logf(total);
  }
  out[index * DECODE_DIM + d] = O(none ? 0.0f : sum.x / total);
  out[index * DECODE_DIM + d + 1] = O(none ? 0.0f : sum.y / total);
  return true;
}

}  // namespace kvtool

// MLX writes the signature of the kernel: this bounds its registers, so that two blocks fit on a multiprocessor.
#undef __global__
#define __global__ __attribute__((global)) __attribute__((launch_bounds(256, 2)))
