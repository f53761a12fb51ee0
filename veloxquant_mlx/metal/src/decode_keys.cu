// Keys of `decode`: how a step of 32 tokens is loaded, and its products with the queries. Needs decode_parts.

namespace kvtool {

// Keys of two 2-bit codes a channel: centroids1[c1] + centroids2[c2].
struct DecodeTwoStageKeys {
  static constexpr bool SHIFTS = true;
  static constexpr bool WHOLE = false;  // `dots` gives sums of half of the columns, that of the others is in lane ^ 2

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
    return (thread_ >= 32 * DECODE_HEADS || queries.bring(row, thread_ / 32, lane)) && sound;
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

// Keys of signs: D - 2 hamming, counted on tensor cores: columns 4-7 have the queries of columns 0-3 again.
struct DecodeSignKeys {
  static constexpr bool SHIFTS = true;
  static constexpr bool WHOLE = true;

  const uint8_t* bits;
  uint32_t a[4];
  uint32_t sign;

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
    sign = __float_as_uint(queries.x[at.g % 4 * 4 + at.t]);
  }

  __device__ __forceinline__ float factor(DecodeQueries, int) const {
    return 1;
  }

  template <bool FULL>
  __device__ __forceinline__ void load(size_t row, int head, int base, int tokens, DecodeLane at) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(bits) + (row + base + at.place) * 4 + at.t;
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      a[r] = __ldg(from + 4 * decode_skip<FULL>(8 * r, base + at.place, tokens));
    }
  }

  __device__ __forceinline__ void dots(float (&s)[4][2], DecodeLane, DecodeQueries) const {
    ATTEND_UNROLL
    for (int tile = 0; tile < 2; tile++) {
      constexpr int ZERO = 0x4b000000;  // 2^23 as a float, to which whole numbers add up as they are
      int c[4] = {ZERO, ZERO, ZERO, ZERO};
      decode_count(c, a[2 * tile], a[2 * tile + 1], ~sign);
      decode_count(c, ~a[2 * tile], ~a[2 * tile + 1], sign);
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        s[2 * tile + i / 2][i % 2] = fmaf(__int_as_float(c[i]), -2.0f, DECODE_DIM + 16777216.0f);
      }
    }
  }
};

// Keys code * scale + zero, scales and zeros of GROUP tokens a channel, GROUP a multiple of a step: the query takes the scales, and zeros
// are keys of their own, the same in every row. Two channels 4 apart make a pair, as they do in a word of codes.
template <int GROUP, typename A>
struct DecodeAffineKeys {
  static constexpr bool SHIFTS = false;                 // a step of keys has one group
  static constexpr bool WHOLE = false;
  static constexpr bool HALF = decode_is_half(A());
  static constexpr int RUN = 64;                        // bytes of a lane's scales
  static constexpr int SIDES = 8 * (RUN + 16);          // of a step's scales and zeros in shared memory: other runs, other banks
  static constexpr int CODES = DECODE_STEP * DECODE_DIM / 2;
  static constexpr int BYTES = SIDES + CODES + 2048;  // and codes; and the lanes' queries, for which there are no registers

  const void* codes;
  const A* scales;
  const A* zeros;
  char* memory;   // this warp's
  float inverse;  // of the power of two of this lane's scales or zeros in `narrow`

  __device__ __forceinline__ bool place(char* all, int thread_) {
    memory = all + thread_ / 32 * BYTES;
    inverse = 1;
    return decode_aligned(codes) && decode_aligned(scales) && decode_aligned(zeros);
  }

  template <typename Q>
  __device__ __forceinline__ bool prepare(char*, DecodeQueries queries, const Q* row, int thread_) {
    return thread_ >= 32 * DECODE_HEADS || queries.bring(row, thread_ / 32, thread_ % 32);
  }

  __device__ __forceinline__ void begin(DecodeQueries queries, DecodeLane at) {
    const float* x = queries.x + DecodeQueries::at(at.g % 4, 32 * at.t);
    ATTEND_UNROLL
    for (int w = 0; w < 4; w++) {
      const float* y = x + 8 * w;
      reinterpret_cast<uint4*>(memory + SIDES + CODES)[32 * w + at.lane] = make_uint4(
          decode_near(y[0], y[4]), decode_near(y[1], y[5]), decode_near(y[2], y[6]), decode_near(y[3], y[7]));
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

  // Scales and zeros of bfloat16 become halves where they are, over a power of two each and in the order of `paired`: a lane does its
  // own eight, and all lanes read them. The powers stay while the largest of 128 is between 2^-5 and 4 of them.
  __device__ __forceinline__ void narrow(DecodeLane at) {
    uint4* own = reinterpret_cast<uint4*>(memory + at.lane * 16 + at.lane / 4 * 16);
    const uint4 given = *own;
    const uint32_t pair[4] = {given.x, given.y, given.z, given.w};
    float value[8];
    float largest = 0;  // no NaN
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      value[i] = __uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16);
      largest = fmaxf(largest, fabsf(value[i]));
    }
    const float part = largest * inverse;
    const uint32_t enough = __ballot_sync(0xffffffffu, part >= 1.0f / 32);
    if (__any_sync(0xffffffffu, !(part < 4)) || enough < 0x10000u || (enough & 0xffffu) == 0) {
      const bool zero = at.lane >= 16;
      float unit;
      float inverses[2];
      const uint32_t size = __float_as_uint(largest);
      decode_unit(__uint_as_float(__reduce_max_sync(0xffffffffu, zero ? 0 : size)), unit, inverses[0]);
      decode_unit(__uint_as_float(__reduce_max_sync(0xffffffffu, zero ? size : 0)), unit, inverses[1]);
      inverse = zero ? inverses[1] : inverses[0];
    }
    const auto both = [&](int i) { return decode_near(value[i] * inverse, value[i + 4] * inverse); };
    *own = make_uint4(both(0), both(1), both(2), both(3));
    __syncwarp();
  }

  // Of 8 channels the pairs 0 and 4, 1 and 5, 2 and 6, 3 and 7.
  static __device__ __forceinline__ uint4 paired(uint4 side) {
    return !HALF ? side
                 : make_uint4(
                       __byte_perm(side.x, side.z, 0x5410), __byte_perm(side.x, side.z, 0x7632), __byte_perm(side.y, side.w, 0x5410),
                       __byte_perm(side.y, side.w, 0x7632));
  }

  // What is over the power of two of the scales (from 0) or of the zeros (16) times this is not.
  __device__ __forceinline__ float unit(int from) const {
    return HALF ? 1.0f : __int_as_float((254 << 23) - __float_as_int(__shfl_sync(0xffffffffu, inverse, from)));
  }

  __device__ __forceinline__ void dots(float (&s)[4][2], DecodeLane at, DecodeQueries) {
    decode_wait();
    const uint4* scale = reinterpret_cast<const uint4*>(memory + at.t * (RUN + 16));
    const uint4* zero = reinterpret_cast<const uint4*>(memory + (at.t + 4) * (RUN + 16));
    const uint4* code = reinterpret_cast<const uint4*>(memory + SIDES) + at.lane;
    const uint4* query = reinterpret_cast<const uint4*>(memory + SIDES + CODES) + at.lane;
    const uint32_t rest = at.g >= 4 ? 0xffffffffu : 0u;
    const uint4 a[4] = {code[0], code[32], code[64], code[96]};
    if (!HALF) {
      narrow(at);
    }
    float by_zero[4] = {};
    float c[2][4] = {};
    ATTEND_UNROLL
    for (int w = 0; w < 4; w++) {
      const uint4 x4 = query[32 * w];
      const uint4 y4 = paired(scale[w]);
      const uint4 z4 = paired(zero[w]);
      ATTEND_UNROLL
      for (int u = 0; u < 2; u++) {
        const uint32_t x0 = u ? x4.z : x4.x;
        const uint32_t x1 = u ? x4.w : x4.y;
        const uint32_t b0 = decode_product(x0, u ? y4.z : y4.x, rest);
        const uint32_t b1 = decode_product(x1, u ? y4.w : y4.y, rest);
        const uint32_t even = u ? z4.z : z4.x;
        const uint32_t odd = u ? z4.w : z4.y;
        decode_mma(by_zero, even, even, odd, odd, x0, x1);
        ATTEND_UNROLL
        for (int tile = 0; tile < 2; tile++) {
          const uint32_t one = w == 0 ? a[2 * tile].x : w == 1 ? a[2 * tile].y : w == 2 ? a[2 * tile].z : a[2 * tile].w;
          const uint4& next = a[2 * tile + 1];
          const uint32_t two = w == 0 ? next.x : w == 1 ? next.y : w == 2 ? next.z : next.w;
          decode_mma(
              c[tile], decode_codes(one, 2 * u), decode_codes(two, 2 * u), decode_codes(one, 2 * u + 1), decode_codes(two, 2 * u + 1), b0,
              b1);
        }
      }
    }
    const float scale_unit = unit(0);
    const float zero_unit = unit(16);
    ATTEND_UNROLL
    for (int column = 0; column < 2; column++) {
      // Half of it: both halves of the columns have it, and are summed.
      const float constant = by_zero[column] * (0.5f * zero_unit);
      ATTEND_UNROLL
      for (int r = 0; r < 4; r++) {
        s[r][column] = fmaf(c[r / 2][r % 2 * 2 + column], scale_unit / DECODE_CODE, constant);
      }
    }
    __syncwarp();
  }
};

}  // namespace kvtool
