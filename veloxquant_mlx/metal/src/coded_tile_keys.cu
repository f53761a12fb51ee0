// Keys of `coded_tiles`: what a lane loads of two rows, and their products with the queries. After coded_parts.cu.

namespace kvtool {

// Keys of a table, as cached: |scale| (entry) and, where the scale has no sign, the mean.
template <int BITS, bool TWO, bool MEAN>
struct TileTableKeys {
  const uint8_t* codes1;
  const uint8_t* codes2;
  const uint16_t* scales;
  const float* table;
  const float* means;  // (H, D)
  bool aligned;

  static constexpr int ORDER = 0;
  using Query = TileQuery<BITS, false>;
  Query query;
  float own;  // of the table
  TileCodes<BITS, TWO, 2> code[2];
  uint32_t scale[2];
  float factor[2];
  float by_mean[2];

  __device__ __forceinline__ void prepare(int threads) {
    tile_fill<0, BITS, TWO>(table, own, threads);
    aligned = coded_aligned(codes1) && coded_aligned(codes2);
  }

  __device__ __forceinline__ void begin(const float* row, int head, DecodeLane at) {
    query.bring(row, at, factor);
    factor[0] *= own;
    factor[1] *= own;
    float sum = 0;
    ATTEND_UNROLL
    for (int i = 0; i < 32; i++) {
      const int d = 32 * at.t + i;
      sum = MEAN ? fmaf(row[d], means[size_t(head) * TILE_DIM + d], sum) : 0.0f;
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    Query::of_heads(sum, at, by_mean);
  }

  __device__ __forceinline__ void load(const size_t (&j)[2], int, int, int, DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const size_t row = j[r];
      code[r].load(codes1, codes2, row, at.t, words);
      scale[r] = coded_short(scales + row);
    }
  }

  // Scores of 2 rows and 2 heads; `next` loads the codes of the next rows.
  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const float*, DecodeLane at, Next next) {
    const uint32_t place = tile_place<0>(at);
    const float sizes[2] = {coded_bfloat(scale[0] & 0x7fffu), coded_bfloat(scale[1] & 0x7fffu)};
    const float centred[2] = {scale[0] < 0x8000u ? 1.0f : 0.0f, scale[1] < 0x8000u ? 1.0f : 0.0f};
    float c[4] = {};
    ATTEND_UNROLL
    for (int u = 0; u < 8; u++) {
      uint32_t near[4];
      uint32_t rest[4];
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        const int half = u / 4;
        const int x = u / 2 % 2;
        const int byte = TileCodes<BITS, TWO, 2>::byte(half, x, u % 2, i / 2);
        tile_pair(code[i % 2].word(half, x, u % 2, i / 2), place, byte, near[i], rest[i]);
      }
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
  }
};

// Keys code * scale + zero, as cached, codes of 4 bits, scales and zeros of GROUP tokens a channel, GROUP a multiple of 16: queries take
// the scales. The two codes of a pair are 4 channels apart.
template <int GROUP>
struct TileAffineKeys {
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* zeros;
  float unit;  // of the scales, a power of two
  bool aligned;

  static constexpr int ORDER = 0;
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

  __device__ __forceinline__ void prepare(int) {
    aligned = coded_aligned(codes) && coded_aligned(scales) && coded_aligned(zeros);
  }

  __device__ __forceinline__ void begin(const float* row_, int head_, DecodeLane at) {
    row = row_;
    head = head_;
    group = -1;
    query.bring(row, at, size);
  }

  __device__ __forceinline__ void load(const size_t (&j)[2], int, int rows_, int base, DecodeLane at, bool words) {
    rows = rows_;
    at_row = base;
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const uint8_t* from = codes + j[r] * 64 + 8 * at.t;
      coded_words<8>(code[r], from, words);
      coded_words<8>(code[r] + 2, from + 32, words);
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
    scale_query(at);
  }

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

  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const float*, DecodeLane at, Next next) {
    bring_sides(at);
    float c[4] = {};
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
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      s[i / 2][i % 2] = fmaf(tile_whole(c[i]), size[i % 2] * (unit / DECODE_CODE), by_zero[i % 2]);
    }
  }
};

}  // namespace kvtool
