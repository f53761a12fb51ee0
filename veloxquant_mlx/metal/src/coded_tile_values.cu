// Values of `coded_tiles`: what a lane loads of the rows of a tile, and their weighted sums. After coded_parts.cu.

namespace kvtool {

// Values of a table; the mean is summed apart.
template <int AT, int BITS, bool TWO, bool MEAN>
struct TileTableValues {
  const uint8_t* codes1;
  const uint8_t* codes2;
  const uint16_t* scales;
  const float* table;
  const float* means;
  float unit;  // of the scales, a power of two
  bool aligned;

  float own;
  TileCodes<BITS, TWO, 1> code[4];
  uint32_t scale[2];

  __device__ __forceinline__ void prepare(int threads) {
    tile_fill<AT, BITS, TWO>(table, own, threads);
    aligned = coded_aligned(codes1) && coded_aligned(codes2);
  }

  // j: rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9; own: rows g and g + 8.
  __device__ __forceinline__ void load(const size_t (&j)[4], const size_t (&mine)[2], DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      code[i].load(codes1, codes2, j[i], at.g, words);
    }
    scale[0] = coded_short(scales + mine[0]);
    scale[1] = coded_short(scales + mine[1]);
  }

  __device__ __forceinline__ void add(TileState& state, const float (&p)[2][2], DecodeLane at) const {
    const uint32_t place = tile_place<AT>(at);
    const uint32_t left = at.t >= 2 ? 0xffffffffu : 0u;
    uint32_t b[2];
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const float factor = coded_bfloat(scale[r] & 0x7fffu) * (1.0f / unit);
      b[r] = decode_transpose(decode_halves(p[r][0] * factor, p[r][1] * factor, left));
      if (MEAN) {
        const float centred = scale[r] < 0x8000u ? 1.0f : 0.0f;
        state.centred[0] = fmaf(p[r][0], centred, state.centred[0]);
        state.centred[1] = fmaf(p[r][1], centred, state.centred[1]);
      }
    }
    constexpr uint32_t LOW = 0x0f0f0f0fu;
    ATTEND_UNROLL
    for (int w = 0; w < 2; w++) {
      uint32_t word[4];
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        word[i] = code[i].numbers(0, w);
      }
      const uint32_t pairs[4] = {
          decode_choose(word[0], word[1] << 4, LOW), decode_choose(word[0] >> 4, word[1], LOW),
          decode_choose(word[2], word[3] << 4, LOW), decode_choose(word[2] >> 4, word[3], LOW)};
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        uint32_t near[4];
        uint32_t rest[4];
        ATTEND_UNROLL
        for (int k = 0; k < 4; k++) {
          tile_pair(pairs[k], place, i, near[k], rest[k]);
        }
        decode_mma(state.o[4 * w + i], near[0], near[1], near[2], near[3], b[0], b[1]);
        decode_mma(state.o[4 * w + i], rest[0], rest[1], rest[2], rest[3], b[0], b[1]);
      }
    }
  }

  // The channel of o[i][0] (k = 0) or o[i][2].
  static __device__ __forceinline__ int channel(int i, int k, DecodeLane at) {
    const int number = i % 4 * 2 + k;
    return 16 * at.g + (BITS == 4 ? 8 * (i / 4) + number : 2 * number + i / 4);
  }

  __device__ __forceinline__ float factor() const {
    return own * unit;
  }
  __device__ __forceinline__ float constant(const TileState& state, int x, int, int head, int d) const {
    return MEAN ? state.centred[x] * means[size_t(head) * TILE_DIM + d] : 0.0f;
  }
};

// Values code * scale + zero, codes of 4 bits, scales and zeros of 32 channels a token: weights take the scales.
struct TileAffineValues {
  const uint8_t* codes;
  const uint16_t* scales;
  const uint16_t* zeros;
  float unit;  // of the scales, a power of two
  bool aligned;

  uint32_t code[4][4];  // 4 channels from 4 g on of 4 groups
  uint32_t scale[2][2];
  uint32_t zero[2][2];

  __device__ __forceinline__ void prepare(int) {
    aligned = coded_aligned(codes) && coded_aligned(scales) && coded_aligned(zeros);
  }

  __device__ __forceinline__ void load(const size_t (&j)[4], const size_t (&mine)[2], DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint8_t* from = codes + j[i] * 64 + 2 * at.g;
      ATTEND_UNROLL
      for (int c = 0; c < 4; c++) {
        coded_words<2>(&code[i][c], from + 16 * c, words);
      }
    }
    ATTEND_UNROLL
    for (int r = 0; r < 2; r++) {
      const size_t from = mine[r] * 4;
      coded_words<8>(scale[r], reinterpret_cast<const uint8_t*>(scales + from), words);
      coded_words<8>(zero[r], reinterpret_cast<const uint8_t*>(zeros + from), words);
    }
  }

  __device__ __forceinline__ void add(TileState& state, const float (&p)[2][2], DecodeLane at) const {
    const uint32_t left = at.t >= 2 ? 0xffffffffu : 0u;
    ATTEND_UNROLL
    for (int c = 0; c < 4; c++) {
      uint32_t b[2];
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        const uint32_t both = scale[r][c / 2];
        const uint32_t bases = zero[r][c / 2];
        const float factor = __uint_as_float(c % 2 ? both & 0xffff0000u : both << 16) * (1.0f / unit);
        const float base = __uint_as_float(c % 2 ? bases & 0xffff0000u : bases << 16);
        b[r] = decode_transpose(decode_halves(p[r][0] * factor, p[r][1] * factor, left));
        state.zero[0][c] = fmaf(p[r][0], base, state.zero[0][c]);
        state.zero[1][c] = fmaf(p[r][1], base, state.zero[1][c]);
      }
      const uint32_t near = code[0][c] | code[1][c] << 16;
      const uint32_t far = code[2][c] | code[3][c] << 16;
      ATTEND_UNROLL
      for (int i = 0; i < 2; i++) {
        decode_mma(
            state.o[2 * c + i], decode_codes(near, 2 * i), decode_codes(near, 2 * i + 1), decode_codes(far, 2 * i),
            decode_codes(far, 2 * i + 1), b[0], b[1]);
      }
    }
  }

  static __device__ __forceinline__ int channel(int i, int k, DecodeLane at) {
    return i / 2 * 32 + 4 * at.g + i % 2 * 2 + k;
  }
  __device__ __forceinline__ float factor() const {
    return unit / DECODE_CODE;
  }
  __device__ __forceinline__ float constant(const TileState& state, int x, int i, int, int) const {
    return state.zero[x][i / 2];
  }
};

// What values of vectors share: weights as they are, and pairs of channels from words of one token.
struct TileWeights {
  uint32_t b[2];

  __device__ __forceinline__ TileWeights(const float (&p)[2][2], DecodeLane at) {
    const uint32_t left = at.t >= 2 ? 0xffffffffu : 0u;
    b[0] = decode_transpose(decode_halves(p[0][0], p[0][1], left));
    b[1] = decode_transpose(decode_halves(p[1][0], p[1][1], left));
  }

  // x: two neighbouring channels of the lane's four tokens.
  __device__ __forceinline__ void add(float (&o)[4], uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) const {
    decode_mma(
        o, __byte_perm(x0, x1, 0x5410u), __byte_perm(x0, x1, 0x7632u), __byte_perm(x2, x3, 0x5410u), __byte_perm(x2, x3, 0x7632u), b[0],
        b[1]);
  }
};

// Values as they are, in halves.
struct TilePlainValues {
  const __half* data;
  bool aligned;

  uint32_t x[4][8];

  __device__ __forceinline__ void prepare(int) {
    aligned = coded_aligned(data);
  }
  __device__ __forceinline__ void load(const size_t (&j)[4], const size_t (&)[2], DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      tile_halves<8>(x[i], data + j[i] * TILE_DIM + 16 * at.g, words);
    }
  }
  __device__ __forceinline__ void add(TileState& state, const float (&p)[2][2], DecodeLane at) const {
    const TileWeights weights(p, at);
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      weights.add(state.o[i], x[0][i], x[1][i], x[2][i], x[3][i]);
    }
  }
  static __device__ __forceinline__ int channel(int i, int k, DecodeLane at) {
    return 16 * at.g + 2 * i + k;
  }
  __device__ __forceinline__ float factor() const {
    return 1;
  }
  __device__ __forceinline__ float constant(const TileState&, int, int, int, int) const {
    return 0;
  }
};

// Values of one table of vectors of SUB channels, 4 or 8, codes of a byte.
template <int AT, int SUB>
struct TileWordValues {
  const uint8_t* codes;
  const float* table;
  bool aligned;

  float own;
  uint32_t code[4];

  __device__ __forceinline__ void prepare(int threads) {
    tile_fill_words<AT, SUB>(table, own, threads);
    aligned = coded_aligned(codes);
  }
  __device__ __forceinline__ void load(const size_t (&j)[4], const size_t (&)[2], DecodeLane at, bool words) {
    constexpr int BYTES = 16 / SUB;
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      coded_words<BYTES>(&code[i], codes + (j[i] * 8 + at.g) * BYTES, words);
    }
  }
  __device__ __forceinline__ void add(TileState& state, const float (&p)[2][2], DecodeLane at) const {
    const TileWeights weights(p, at);
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {  // channels 4 i to 4 i + 3
      uint4 word[4];
      ATTEND_UNROLL
      for (int token = 0; token < 4; token++) {
        word[token] = tile_word<AT, SUB>(code[token], SUB == 4 ? i : i / 2, SUB == 4 ? 0 : i % 2, at);
      }
      weights.add(state.o[2 * i], word[0].x, word[1].x, word[2].x, word[3].x);
      weights.add(state.o[2 * i], word[0].z, word[1].z, word[2].z, word[3].z);
      weights.add(state.o[2 * i + 1], word[0].y, word[1].y, word[2].y, word[3].y);
      weights.add(state.o[2 * i + 1], word[0].w, word[1].w, word[2].w, word[3].w);
    }
  }
  static __device__ __forceinline__ int channel(int i, int k, DecodeLane at) {
    return 16 * at.g + 2 * i + k;
  }
  __device__ __forceinline__ float factor() const {
    return own;
  }
  __device__ __forceinline__ float constant(const TileState&, int, int, int, int) const {
    return 0;
  }
};

}  // namespace kvtool
