// Keys of `coded_tiles` before RoPE. After coded_parts.cu.

namespace kvtool {

// Keys of a table: |scale| (entry) and, where the scale has no sign, the mean; turned back and rotated. 8 rows at a time: rows g of a
// product are channels of bit 6 = 0 of key g, rows g + 8 the others; in products with queries, halves and what is left of them.
template <int BITS, bool TWO, bool MEAN>
struct TileTurnedTableKeys {
  const uint8_t* codes1;
  const uint8_t* codes2;
  const uint16_t* scales;
  const float* table;
  const float* means;  // (H, D), transformed over bits 5 to 0
  float unit;          // of decoded keys, a power of two
  float* head_mean;    // in shared memory: of this warp
  const float* zeros;
  bool aligned;

  static constexpr int ORDER = BITS;
  static constexpr bool TURN = true;
  static constexpr bool SIGNS = BITS == 1;  // codes are signs of half the difference of the table's entries; half their sum is channel 0's
  using Query = TileQuery<BITS, true>;
  Query query;
  float own;  // of the table
  TileCodes<BITS, TWO, 2> code[2];
  uint32_t scale[2];
  uint32_t turn[2][2];
  float factor[2];
  float middle;  // SIGNS

  __device__ __forceinline__ void prepare(int threads) {
    if (SIGNS) {
      own = 0.5f * (table[0] - table[1]);
    } else {
      tile_fill<0, BITS, TWO>(table, own, threads);
    }
    aligned = coded_aligned(codes1) && coded_aligned(codes2);
  }

  __device__ __forceinline__ void begin(const float* row, int head, DecodeLane at) {
    query.bring(row, at, factor);
    factor[0] *= unit;
    factor[1] *= unit;
    middle = SIGNS && at.t == 0 ? (table[0] + table[1]) * (0.25f * TILE_DIM / unit) : 0.0f;
    ATTEND_UNROLL
    for (int out5 = 0; out5 < 2; out5++) {
      ATTEND_UNROLL
      for (int high = 0; high < 2; high++) {
        const int odd = ((at.t >> 1) & out5) ^ ((at.t & 1) & (at.g >> 2)) ^ (high & (at.g >> 1) & 1);
        turn[out5][high] = 0x3c003c00u ^ (odd ? 0x80008000u : 0u) ^ (at.g & 1 ? 0x80000000u : 0u);
      }
    }
    if (MEAN) {
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        head_mean[32 * i + at.lane] = means[size_t(head) * TILE_DIM + 32 * i + at.lane] * (1.0f / unit);
      }
      __syncwarp();
    }
  }

  __device__ __forceinline__ void load(const size_t (&j)[2], int, int, int, DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const size_t row = j[r];
      code[r].load(codes1, codes2, row, at.t, words);
      scale[r] = coded_short(scales + row);
    }
  }

  // Scores of 2 rows and 2 heads; `next` once the codes have been read.
  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const float* turns, DecodeLane at, Next next) {
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      float c[4] = {};
      half(c, r, turns + 8 * r * TILE_TURNS, at, [&] {
        if (r == 1) {
          next();
        }
      });
      s[r][0] = c[0] + c[2];
      s[r][1] = c[1] + c[3];
    }
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      s[i / 2][i % 2] = tile_whole(s[i / 2][i % 2]) * factor[i % 2];
    }
  }

  // Products of 4 bits and, of the other stages but for bit 6, x; y is left.
  __device__ __forceinline__ void multiply_pairs(float (&y)[4][2][4], int r, DecodeLane at) const {
    const uint32_t place = tile_place<0>(at);
    ATTEND_UNROLL
    for (int u = 0; u < 4; u++) {
      uint32_t near[4];
      uint32_t rest[4];
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        const int byte = TileCodes<BITS, TWO, 2>::byte(i % 2, u / 2, u % 2, i / 2);
        tile_pair(code[r].word(i % 2, u / 2, u % 2, i / 2), place, byte, near[i], rest[i]);
      }
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        const int out5 = i % 2;
        const int x = i / 2;
        const uint32_t odd = x & (u / 2) ? 0x80008000u : 0u;
        const uint32_t first = turn[out5][0] ^ odd;
        const uint32_t second = turn[out5][1] ^ odd;
        decode_mma(y[2 * x + u % 2][out5], near[0], near[1], near[2], near[3], first, second);
        decode_mma(y[2 * x + u % 2][out5], rest[0], rest[1], rest[2], rest[3], first, second);
      }
    }
  }

  // Products of all bits but bit 6: a code is the sign of a 1.
  __device__ __forceinline__ void multiply_signs(float (&y)[4][2][4], int r) const {
    const uint32_t apart[2] = {code[r].one[0] | code[r].one[0] << 12, code[r].one[1] | code[r].one[1] << 12};
    ATTEND_UNROLL
    for (int u = 0; u < 4; u++) {
      uint32_t a[4];
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        a[i] = 0x3c003c00u ^ (apart[i % 2] << (15 - 8 * (i / 2) - u) & 0x80008000u);
      }
      ATTEND_UNROLL
      for (int i = 0; i < 8; i++) {
        const int out5 = i % 2;
        const int out = i / 2;  // x and y
        const uint32_t odd = ((out & u) ^ (out & u) >> 1) & 1 ? 0x80008000u : 0u;
        decode_mma(y[out][out5], a[0], a[1], a[2], a[3], turn[out5][0] ^ odd, turn[out5][1] ^ odd);
      }
    }
  }

  template <typename Next>
  __device__ __forceinline__ void half(float (&c)[4], int r, const float* turns, DecodeLane at, Next next) const {
    float y[4][2][4] = {};  // products, bit 5, (bit 6, e)
    if (SIGNS) {
      multiply_signs(y, r);
    } else {
      multiply_pairs(y, r, at);
    }
    const float length = coded_bfloat(scale[r] & 0x7fffu);
    const float size = length * (own * (1.0f / unit));
    const float* mean = MEAN && scale[r] < 0x8000u ? head_mean : zeros;
    ATTEND_UNROLL
    for (int out5 = 0; out5 < 2; out5++) {
      ATTEND_UNROLL
      for (int u = 0; u < 4 && !SIGNS; u += 2) {
        ATTEND_UNROLL
        for (int i = 0; i < 4; i++) {
          const float a = y[u][out5][i];
          const float b = y[u + 1][out5][i];
          y[u][out5][i] = a + b;
          y[u + 1][out5][i] = a - b;
        }
      }
      ATTEND_UNROLL
      for (int bit6 = 0; bit6 < 2; bit6++) {
        float m[8] = {};
        ATTEND_UNROLL
        for (int i = 0; i < 8 && MEAN; i += 4) {
          *reinterpret_cast<float4*>(m + i) = *reinterpret_cast<const float4*>(mean + 64 * bit6 + 32 * out5 + 8 * at.t + i);
        }
        ATTEND_UNROLL
        for (int i = 0; i < 8; i++) {
          float& x = y[i / 2][out5][2 * bit6 + i % 2];
          x = MEAN ? fmaf(x, size, m[tile_low<BITS>(i / 4, i / 2 % 2, i % 2)]) : x * size;
        }
      }
    }
    if (SIGNS) {
      y[0][0][0] = fmaf(length, middle, y[0][0][0]);
      y[0][0][2] = fmaf(length, middle, y[0][0][2]);
    }
    ATTEND_UNROLL
    for (int u = 0; u < 4; u++) {
      if (u == 1) {
        next();
      }
      ATTEND_UNROLL
      for (int out5 = 0; out5 < 2; out5++) {
        const float4 angle = *reinterpret_cast<const float4*>(turns + tile_turn(out5, u, at.t));
        ATTEND_UNROLL
        for (int e = 0; e < 2; e++) {
          const float less = e ? angle.y : angle.x;
          const float more = e ? angle.w : angle.z;
          const float a = y[u][out5][e];
          const float b = y[u][out5][2 + e];
          y[u][out5][e] = fmaf(less, a, more * b);
          y[u][out5][2 + e] = fmaf(more, a, -less * b);
        }
      }
      ATTEND_UNROLL
      for (int bit6 = 0; bit6 < 2; bit6++) {
        uint32_t a[4];
        ATTEND_UNROLL
        for (int out5 = 0; out5 < 2; out5++) {
          tile_split(y[u][out5][2 * bit6], y[u][out5][2 * bit6 + 1], a[2 * out5], a[2 * out5 + 1]);
        }
        query.multiply(c, 4 * bit6 + u, a);
      }
    }
  }
};

// Keys code * scale + zero before RoPE, codes of 4 bits, scales and zeros of GROUP tokens a channel, GROUP a multiple of 16: a product
// multiplies 8 channels of codes and 8 ones with two diagonals, of scales and of zeros. The two codes of a pair are 4 channels apart.
template <int GROUP>
struct TileTurnedAffineKeys {
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* zeros;
  float unit;             // of keys, a power of two
  float* sides;           // in shared memory, of this warp: of 8 columns, 36 words each: scale and zero as halves, of bit 6 = 0 and 1
  const float* no_sides;  // zeros
  bool aligned;

  static constexpr int ORDER = 1;
  static constexpr bool TURN = false;
  using Query = TileQuery<1, false>;
  Query query;
  int group;
  bool fresh;
  float factor[2];
  uint32_t code[2][4];
  uint32_t scale[2];  // of channels 4 lane to 4 lane + 3
  uint32_t zero[2];

  __device__ __forceinline__ void prepare(int) {
    aligned = coded_aligned(codes) && coded_aligned(scales) && coded_aligned(zeros);
  }

  __device__ __forceinline__ void begin(const float* row, int, DecodeLane at) {
    group = -1;
    fresh = false;
    query.bring(row, at, factor);
    factor[0] *= unit;
    factor[1] *= unit;
  }

  __device__ __forceinline__ void load(const size_t (&j)[2], int head, int rows, int base, DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const uint8_t* from = codes + j[r] * 64 + 8 * at.t;
      coded_words<8>(code[r], from, words);
      coded_words<8>(code[r] + 2, from + 32, words);
    }
    const int now = base / GROUP;
    if (now != group) {
      const size_t from = (size_t(head) * ((rows - 1) / GROUP + 1) + now) * TILE_DIM + 4 * at.lane;
      coded_words<8>(scale, reinterpret_cast<const uint8_t*>(scales + from), words);
      coded_words<8>(zero, reinterpret_cast<const uint8_t*>(zeros + from), words);
      group = now;
      fresh = true;
    }
  }

  // Scales and zeros where the lanes of the diagonals find them: column 2 t + e of four channels, their bits 3, x and y.
  __device__ __forceinline__ void put_sides(DecodeLane at) {
    const unsigned lane = unsigned(at.lane);
    uint32_t* to = reinterpret_cast<uint32_t*>(sides) + (lane / 4 % 4 * 2 + lane % 2) * 36 + lane / 2 % 2 * 16 + lane / 16 * 2;
    const float inverse = 1.0f / unit;
    __syncwarp();
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint32_t high = i % 2 ? 0xffff0000u : 0u;
      const float s = __uint_as_float(high ? scale[i / 2] & high : scale[i / 2] << 16) * (inverse / DECODE_CODE);
      const float z = __uint_as_float(high ? zero[i / 2] & high : zero[i / 2] << 16) * inverse;
      const __half2 both = __floats2half2_rn(s, z);
      const uint32_t word = *reinterpret_cast<const uint32_t*>(&both);
      const bool odd = lane % 2;
      *reinterpret_cast<uint2*>(to + 4 * i) = odd ? make_uint2(word << 16, word & 0xffff0000u) : make_uint2(word & 0xffffu, word >> 16);
    }
    __syncwarp();
  }

  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const float* turns, DecodeLane at, Next next) {
    if (fresh) {
      put_sides(at);
      fresh = false;
    }
    constexpr uint32_t ONES = 0x3c003c00u;
    const float* own = at.t == at.g / 2 ? sides + at.g * 36 : no_sides;
    float c[4] = {};
    ATTEND_UNROLL
    for (int u = 0; u < 4; u++) {
      float y[2][2][4] = {};  // bit 6, bit 3, (row, e)
      ATTEND_UNROLL
      for (int third = 0; third < 2; third++) {
        const uint4 side = *reinterpret_cast<const uint4*>(own + 16 * third + 4 * u);
        const uint32_t a0 = decode_codes(code[0][third], u);
        const uint32_t a1 = decode_codes(code[1][third], u);
        const uint32_t b0 = decode_codes(code[0][2 + third], u);
        const uint32_t b1 = decode_codes(code[1][2 + third], u);
        decode_mma(y[0][third], a0, a1, ONES, ONES, side.x, side.y);
        decode_mma(y[1][third], b0, b1, ONES, ONES, side.z, side.w);
      }
      if (u == 3) {
        next();
      }
      query.turn_and_multiply(c, u, y[0], y[1], turns, at.t);
    }
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      s[i / 2][i % 2] = tile_whole(c[i]) * factor[i % 2];
    }
  }
};

}  // namespace kvtool
