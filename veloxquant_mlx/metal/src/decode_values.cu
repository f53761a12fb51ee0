// The running softmax of `decode`, and its values: how a step of 32 tokens is loaded and added. Needs decode_parts.

namespace kvtool {

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

  // What goes with this lane's token, which is not seen.
  __device__ __forceinline__ void hide() {
    scale = S(0.0f);
  }

  __device__ __forceinline__ void add(DecodeState& state, const float (&p)[4][2], DecodeLane at) {
    constexpr uint32_t LOW = 0x0f0f0f0fu;
    const uint32_t place = uint32_t(at.lane) * 4;
    float own = 1;
    bool odd = false;
    if (SCALED) {
      own = float(scale);
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

  // Of a sum, number k of the two of a product's channels.
  __device__ __forceinline__ float factor(int, int) const {
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

  __device__ __forceinline__ void hide() {
    ATTEND_UNROLL
    for (int c = 0; c < GROUPS; c++) {
      scale.x[c] = zero.x[c] = A(0.0f);
    }
  }

  __device__ __forceinline__ void add(DecodeState& state, const float (&p)[4][2], DecodeLane at) {
    float largest = 0;
    bool lost = false;  // fmaxf drops a NaN
    float side[8];
    ATTEND_UNROLL
    for (int c = 0; c < 4; c++) {
      side[c] = float(scale.x[c * GROUPS / 4]);
      side[4 + c] = float(zero.x[c * GROUPS / 4]);
      largest = fmaxf(largest, fabsf(side[c]));
      lost = lost || isnan(side[c]);
    }
    const bool odd = state.admit(lost ? ATTEND_INF : largest);
    uint4* sides = reinterpret_cast<uint4*>(memory + CODES);
    uint32_t pair[4];
    ATTEND_UNROLL
    for (int c = 0; c < 4; c++) {
      pair[c] = decode_near(side[c] * state.inverse, side[c] * state.inverse);
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
        const uint32_t near = decode_near(p[r][0], p[r][1]);
        const uint32_t far = decode_left(p[r][0], p[r][1], near) & rest;
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
            const uint32_t one = x[2 * j];
            const uint32_t two = x[2 * j + 1];
            decode_mma(
                state.o[2 * c + u], decode_codes(one, 2 * u), second(one, u), decode_codes(two, 2 * u), second(two, u), b[c][0], b[c][1]);
          }
        }
      }
    }
    __syncwarp();
  }

  static __device__ __forceinline__ int channel(int i, DecodeLane at) {
    return i / 2 * 32 + 4 * at.g + i % 2 * 2;
  }

  // Code 2 u + 1 of each run. Number 1 stays where it is, a quarter of the others, which costs two bits of its sums and no shift.
  static __device__ __forceinline__ uint32_t second(uint32_t codes_, int u) {
    return u ? decode_codes(codes_, 3) : codes_ & 0x00f000f0u;
  }

  __device__ __forceinline__ float factor(int i, int k) const {
    return (i % 2 == 0 && k == 1 ? 4.0f : 1.0f) / DECODE_CODE;
  }
};

}  // namespace kvtool
