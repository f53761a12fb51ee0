// Keys of `coded_tiles`: what a lane loads of two rows, and their products with the queries. After coded_parts.cu.

namespace kvtool {

// Keys of a table: |scale| (entry) and, where the scale has no sign, the mean. TURN: before RoPE, turned back and rotated.
template <int BITS, bool TWO, bool TURN, bool MEAN>
struct TileTableKeys {
  const uint8_t* codes1;
  const uint8_t* codes2;
  const uint16_t* scales;
  const float* table;
  const float* means;   // (H, D): as stored; TURN: transformed over bits 5 to 0
  const float* angles;  // cosines and sines, 64 each a row
  const float* signs;   // TURN: of pairs, 64
  float unit;           // TURN: of decoded keys, a power of two
  float* head_mean;     // in shared memory, TILE_OWN floats a warp: the head's mean and the signs
  bool aligned;

  using Query = TileQuery<BITS, TURN>;
  Query query;
  float own;  // of the table
  TileCodes<BITS, TWO, 2> code[2];
  uint32_t scale[2];
  uint32_t turn[2][2];
  float factor[2];
  float by_mean[2];

  __device__ __forceinline__ void prepare() {
    tile_fill<0, BITS, TWO>(table, own);
    aligned = coded_aligned(codes1) && coded_aligned(codes2);
  }

  __device__ __forceinline__ void begin(const float* row, int head, DecodeLane at) {
    query.bring(row, at, factor);
    factor[0] *= TURN ? unit : own;
    factor[1] *= TURN ? unit : own;
    if (!TURN) {
      float sum = 0;
      ATTEND_UNROLL
      for (int i = 0; i < 32; i++) {
        const int d = 32 * at.t + i;
        sum = MEAN ? fmaf(row[d], means[size_t(head) * TILE_DIM + d], sum) : 0.0f;
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      Query::of_heads(sum, at, by_mean);
    } else {
      ATTEND_UNROLL
      for (int out5 = 0; out5 < 2; out5++) {
        ATTEND_UNROLL
        for (int high = 0; high < 2; high++) {
          const int odd = ((at.t >> 1) & out5) ^ ((at.t & 1) & (at.g >> 2)) ^ (high & (at.g >> 1) & 1);
          turn[out5][high] = 0x3c003c00u ^ (odd ? 0x80008000u : 0u) ^ (at.g & 1 ? 0x80000000u : 0u);
        }
      }
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        head_mean[32 * i + at.lane] = MEAN ? means[size_t(head) * TILE_DIM + 32 * i + at.lane] * (1.0f / unit) : 0.0f;
      }
      head_mean[TILE_DIM + at.lane] = signs[at.lane];
      head_mean[TILE_DIM + 32 + at.lane] = signs[32 + at.lane];
      __syncwarp();
    }
  }

  __device__ __forceinline__ void load(int head, int rows, const int (&j)[2], DecodeLane at) {
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const size_t row = size_t(head) * rows + j[r];
      code[r].load(codes1, codes2, row, at.t, aligned);
      scale[r] = __ldg(scales + row);
    }
  }

  __device__ __forceinline__ void operands(int u, uint32_t (&near)[4], uint32_t (&rest)[4], uint32_t place) const {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      const int half = u / 4;
      const int x = u / 2 % 2;
      const uint2 pair = tile_pair<0>(
          code[i % 2].word(half, x, u % 2, i / 2), place, TileCodes<BITS, TWO, 2>::byte(half, x, u % 2, i / 2));
      near[i] = pair.x;
      rest[i] = pair.y;
    }
  }

  // Scores of 2 rows and 2 heads, but for the factors of heads; `next` loads the codes of the next rows.
  template <typename Next>
  __device__ __forceinline__ void dots(
      float (&s)[2][2], const int (&from_start)[2], DecodeLane at, Next next) {
    const uint32_t place = uint32_t(at.lane % 16) * 8;
    const float sizes[2] = {coded_bfloat(scale[0] & 0x7fffu), coded_bfloat(scale[1] & 0x7fffu)};
    const float centred[2] = {scale[0] < 0x8000u ? 1.0f : 0.0f, scale[1] < 0x8000u ? 1.0f : 0.0f};
    float c[4] = {};
    uint32_t near[4];
    uint32_t rest[4];
    if (!TURN) {
      ATTEND_UNROLL
      for (int u = 0; u < 8; u++) {
        operands(u, near, rest, place);
        query.multiply(c, u, near);
        query.multiply(c, u, rest);
      }
      next();
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        ATTEND_UNROLL
        for (int x = 0; x < 2; x++) {
          s[r][x] = tile_whole(c[2 * r + x]) * (sizes[r] * factor[x]);
          if (MEAN) {
            s[r][x] = fmaf(centred[r], by_mean[x], s[r][x]);
          }
        }
      }
    } else {
      float y[8][2][4] = {};  // products, bit 5, (row, e)
      ATTEND_UNROLL
      for (int u = 0; u < 8; u++) {
        operands(u, near, rest, place);
        ATTEND_UNROLL
        for (int out5 = 0; out5 < 2; out5++) {
          decode_mma(y[u][out5], near[0], near[1], near[2], near[3], turn[out5][0], turn[out5][1]);
          decode_mma(y[u][out5], rest[0], rest[1], rest[2], rest[3], turn[out5][0], turn[out5][1]);
        }
      }
      next();
      float size[2];
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        size[r] = sizes[r] * (own * (1.0f / unit));
      }
      ATTEND_UNROLL
      for (int out5 = 0; out5 < 2; out5++) {
        ATTEND_UNROLL
        for (int step = 1; step < 4; step *= 2) {
          ATTEND_UNROLL
          for (int u = 0; u < 8; u++) {
            if ((u & step) == 0) {
              ATTEND_UNROLL
              for (int i = 0; i < 4; i++) {
                const float a = y[u][out5][i];
                const float b = y[u + step][out5][i];
                y[u][out5][i] = a + b;
                y[u + step][out5][i] = a - b;
              }
            }
          }
        }
        if (MEAN) {
          ATTEND_UNROLL
          for (int half = 0; half < 2; half++) {
            float m[8];
            ATTEND_UNROLL
            for (int i = 0; i < 8; i += 4) {
              *reinterpret_cast<float4*>(m + i) = *reinterpret_cast<const float4*>(head_mean + 64 * half + 32 * out5 + 8 * at.t + i);
            }
            ATTEND_UNROLL
            for (int u = 0; u < 4; u++) {
              ATTEND_UNROLL
              for (int i = 0; i < 4; i++) {
                const float mean = centred[i / 2] * m[tile_low<BITS>(u / 2, u % 2, i % 2)];
                y[4 * half + u][out5][i] = fmaf(y[4 * half + u][out5][i], size[i / 2], mean);
              }
            }
          }
        }
        if (!MEAN) {
          ATTEND_UNROLL
          for (int i = 0; i < 32; i++) {
            y[i / 4][out5][i % 4] *= size[i % 4 / 2];
          }
        }
        float sign[8];
        ATTEND_UNROLL
        for (int i = 0; i < 8; i += 4) {
          *reinterpret_cast<float4*>(sign + i) = *reinterpret_cast<const float4*>(head_mean + TILE_DIM + 32 * out5 + 8 * at.t + i);
        }
        ATTEND_UNROLL
        for (int r = 0; r < 2; r++) {
          Query::rotate(y, out5, r, angles + size_t(from_start[r]) * TILE_DIM, sign, at);
        }
      }
      query.dots(c, y);
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        s[r][0] = tile_whole(c[2 * r]) * factor[0];
        s[r][1] = tile_whole(c[2 * r + 1]) * factor[1];
      }
    }
  }
};

// Keys code * scale + zero, codes of 4 bits, scales and zeros of GROUP tokens a channel, GROUP a multiple of 16. As cached, queries take the
// scales; before RoPE keys are made in float32. The two codes of a pair are 4 channels apart.
template <int GROUP, bool ROPE>
struct TileAffineKeys {
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* zeros;
  const float* angles;
  float unit;  // of the scales, or (ROPE) of keys, a power of two
  bool aligned;

  using Query = TileQuery<1, false>;
  Query query;
  const float* row;
  int head;
  int rows;
  int at_row;
  int group;
  float size[2];
  float by_zero[2];
  uint32_t code[2][4];
  uint32_t scale[16];  // pairs of neighbours: 16 channels from 16 t on, 16 from 64 + 16 t on
  uint32_t zero[16];

  __device__ __forceinline__ void prepare() {
    aligned = coded_aligned(codes) && coded_aligned(scales) && coded_aligned(zeros);
  }

  __device__ __forceinline__ void begin(const float* row_, int head_, DecodeLane at) {
    row = row_;
    head = head_;
    group = -1;
    query.bring(row, at, size);
  }

  __device__ __forceinline__ void load(int head_, int rows_, const int (&j)[2], DecodeLane at) {
    rows = rows_;
    at_row = j[0];
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const uint8_t* from = codes + (size_t(head_) * rows_ + j[r]) * 64 + 8 * at.t;
      coded_words<8>(code[r], from, aligned);
      coded_words<8>(code[r] + 2, from + 32, aligned);
    }
  }

  static __device__ __forceinline__ float side(const uint32_t (&sides)[16], int half, int i) {
    const uint32_t pair = sides[8 * half + i / 2];
    return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
  }

  // Scales and zeros of the rows loaded.
  __device__ __forceinline__ void bring_sides(DecodeLane at) {
    const int now = at_row / GROUP;
    if (now == group) {
      return;
    }
    group = now;
    const size_t from = (size_t(head) * ((rows - 1) / GROUP + 1) + now) * TILE_DIM + 16 * at.t;
    ATTEND_UNROLL
    for (int half = 0; half < 2; half++) {
      coded_words<32>(scale + 8 * half, reinterpret_cast<const uint8_t*>(scales + from + 64 * half), aligned);
      coded_words<32>(zero + 8 * half, reinterpret_cast<const uint8_t*>(zeros + from + 64 * half), aligned);
    }
    if (!ROPE) {
      scale_query(at);
    }
  }

  // As cached: queries take the scales.
  __device__ __forceinline__ void scale_query(DecodeLane at) {
    const float inverse = query.inverse * (1.0f / unit);
    float sum = 0;
    ATTEND_UNROLL
    for (int u = 0; u < 8; u++) {
      ATTEND_UNROLL
      for (int high = 0; high < 2; high++) {
        float y[2];
        ATTEND_UNROLL
        for (int e = 0; e < 2; e++) {
          const int i = 8 * high + tile_low<1>(u / 2 % 2, u % 2, e);
          const float x = row[64 * (u / 4) + 16 * at.t + i];
          sum = fmaf(x, side(zero, u / 4, i), sum);
          y[e] = x * inverse * side(scale, u / 4, i);
        }
        query.put(u, high, y[0], y[1], at);
      }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    Query::of_heads(sum, at, by_zero);
  }

  // The two rows' keys as numbers, rotated.
  __device__ __forceinline__ void rotated(float (&y)[8][2][4], const int (&from_start)[2], DecodeLane at) const {
    ATTEND_UNROLL
    for (int u = 0; u < 8; u++) {
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {  // bit 3 and the low bit
        const int channel = 8 * (i / 2) + tile_low<1>(u / 2 % 2, u % 2, i % 2);
        const float step = side(scale, u / 4, channel) * (1.0f / unit);
        const float base = side(zero, u / 4, channel) * (1.0f / unit);
        ATTEND_UNROLL
        for (int r = 0; r < 2; r++) {
          const uint32_t number = code[r][u / 4 * 2 + i / 2] >> (4 * (u % 4) + 16 * (i % 2)) & 15u;
          y[u][i / 2][2 * r + i % 2] = fmaf(__uint_as_float(0x4b000000u | number) - 8388608.0f, step, base);
        }
      }
    }
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      Query::rotate(y, i / 2, i % 2, angles + size_t(from_start[i % 2]) * TILE_DIM, nullptr, at);
    }
  }

  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const int (&from_start)[2], DecodeLane at, Next next) {
    bring_sides(at);
    float c[4] = {};
    if (ROPE) {
      float y[8][2][4];
      rotated(y, from_start, at);
      next();
      query.dots(c, y);
    } else {
      ATTEND_UNROLL
      for (int u = 0; u < 8; u++) {
        uint32_t a[4];
        ATTEND_UNROLL
        for (int i = 0; i < 4; i++) {
          a[i] = decode_codes(code[i % 2][u / 4 * 2 + i / 2], u % 4);
        }
        query.multiply(c, u, a);
      }
      next();
    }
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      const float sum = tile_whole(c[i]);
      s[i / 2][i % 2] = ROPE ? sum * (size[i % 2] * unit) : fmaf(sum, size[i % 2] * (unit / DECODE_CODE), by_zero[i % 2]);
    }
  }
};

}  // namespace kvtool
