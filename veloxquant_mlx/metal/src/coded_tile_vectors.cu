// Keys of `coded_tiles` that are halves, vectors of a table, or scores. After coded_parts.cu.

namespace kvtool {

// Keys as cached, in halves.
struct TilePlainKeys {
  const __half* data;
  bool aligned;

  static constexpr int ORDER = 0;
  using Query = TileQuery<4, false>;
  Query query;
  float factor[2];
  uint32_t x[2][16];

  __device__ __forceinline__ void prepare(int) {
    aligned = coded_aligned(data);
  }
  __device__ __forceinline__ void begin(const float* row, int, DecodeLane at) {
    query.bring(row, at, factor);
  }
  __device__ __forceinline__ void load(const size_t (&j)[2], int, int, int, DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      const __half* from = data + j[i % 2] * TILE_DIM + 64 * (i / 2) + 16 * at.t;
      tile_halves<8>(x[i % 2] + 8 * (i / 2), from, words);
    }
  }

  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const float*, DecodeLane, Next next) {
    float c[4] = {};
    ATTEND_UNROLL
    for (int u = 0; u < 8; u++) {
      const int from = u / 4 * 8 + u % 4;
      const uint32_t a[4] = {x[0][from], x[1][from], x[0][from + 4], x[1][from + 4]};
      query.multiply(c, u, a);
    }
    next();
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      s[i / 2][i % 2] = tile_whole(c[i]) * factor[i % 2];
    }
  }
};

// Keys of one table of vectors of SUB channels, 4 or 8, codes of a byte.
template <int SUB>
struct TileWordKeys {
  const uint8_t* codes;
  const float* table;
  bool aligned;

  static constexpr int ORDER = 0;
  using Query = TileQuery<4, false>;
  Query query;
  float own;
  float factor[2];
  uint32_t code[2][2];  // 4 or 2 codes of each half of a row

  __device__ __forceinline__ void prepare(int threads) {
    tile_fill_words<0, SUB>(table, own, threads);
    aligned = coded_aligned(codes);
  }
  __device__ __forceinline__ void begin(const float* row, int, DecodeLane at) {
    query.bring(row, at, factor);
  }
  __device__ __forceinline__ void load(const size_t (&j)[2], int, int, int, DecodeLane at, bool words) {
    constexpr int BYTES = 16 / SUB;
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      const uint8_t* from = codes + (j[i % 2] * 8 + 4 * (i / 2) + at.t) * BYTES;
      coded_words<BYTES>(&code[i % 2][i / 2], from, words);
    }
  }

  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const float*, DecodeLane at, Next next) {
    float c[4] = {};
    ATTEND_UNROLL
    for (int half = 0; half < 2; half++) {
      ATTEND_UNROLL
      for (int x = 0; x < 2; x++) {
        uint4 word[4];
        ATTEND_UNROLL
        for (int i = 0; i < 4; i++) {
          word[i] = tile_word<0, SUB>(code[i % 2][half], SUB == 4 ? i / 2 * 2 + x : i / 2, SUB == 4 ? 0 : x, at);
        }
        const uint32_t near0[4] = {word[0].x, word[1].x, word[2].x, word[3].x};
        const uint32_t near1[4] = {word[0].y, word[1].y, word[2].y, word[3].y};
        const uint32_t rest0[4] = {word[0].z, word[1].z, word[2].z, word[3].z};
        const uint32_t rest1[4] = {word[0].w, word[1].w, word[2].w, word[3].w};
        query.multiply(c, 4 * half + 2 * x, near0);
        query.multiply(c, 4 * half + 2 * x, rest0);
        query.multiply(c, 4 * half + 2 * x + 1, near1);
        query.multiply(c, 4 * half + 2 * x + 1, rest1);
      }
    }
    next();
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      s[i / 2][i % 2] = tile_whole(c[i]) * (factor[i % 2] * own);
    }
  }
};

// Keys of a table of vectors of 4 channels, in halves, for every place of a row of every head.
template <bool ROPE>
struct TilePlaceKeys {
  const uint8_t* codes;
  const __half* table;
  bool aligned;

  static constexpr int ORDER = ROPE ? 4 : 0;
  static constexpr bool TURN = false;
  using Query = TileQuery<4, false>;
  Query query;
  int head;
  float factor[2];
  uint32_t code[2][2];

  __device__ __forceinline__ void prepare(int) {
    aligned = coded_aligned(codes) && coded_aligned(table);
  }
  __device__ __forceinline__ void begin(const float* row, int head_, DecodeLane at) {
    head = head_;
    query.bring(row, at, factor);
  }
  __device__ __forceinline__ void load(const size_t (&j)[2], int, int, int, DecodeLane at, bool words) {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      coded_words<4>(&code[i % 2][i / 2], codes + j[i % 2] * 32 + 16 * (i / 2) + 4 * at.t, words);
    }
  }

  template <typename Next>
  __device__ __forceinline__ void dots(float (&s)[2][2], const float* turns, DecodeLane at, Next next) {
    uint32_t word[8][4];  // products, (bit 3, row)
    ATTEND_UNROLL
    for (int i = 0; i < 16; i++) {
      const int half = i / 8;
      const int entry = i / 2 % 4;  // bits 3 and 2
      const int r = i % 2;
      const uint32_t number = code[r][half] >> (8 * entry) & 255u;
      const size_t from = ((size_t(head) * 32 + 16 * half + 4 * at.t + entry) * 256 + number) * 4;
      uint32_t pairs[2];
      coded_words<8>(pairs, reinterpret_cast<const uint8_t*>(table + from), aligned);
      word[4 * half + entry % 2 * 2][entry / 2 * 2 + r] = pairs[0];
      word[4 * half + entry % 2 * 2 + 1][entry / 2 * 2 + r] = pairs[1];
    }
    next();
    float c[4] = {};
    if (ROPE) {
      ATTEND_UNROLL
      for (int u = 0; u < 4; u++) {
        float y[2][2][4];  // bit 6, bit 3, (row, e)
        ATTEND_UNROLL
        for (int i = 0; i < 8; i++) {
          const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word[u + i / 4 * 4][i % 4]));
          y[i / 4][i / 2 % 2][i % 2 * 2] = pair.x;
          y[i / 4][i / 2 % 2][i % 2 * 2 + 1] = pair.y;
        }
        query.turn_and_multiply(c, u, y[0], y[1], turns, at.t);
      }
    } else {
      ATTEND_UNROLL
      for (int u = 0; u < 8; u++) {
        query.multiply(c, u, word[u]);
      }
    }
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      s[i / 2][i % 2] = tile_whole(c[i]) * factor[i % 2];
    }
  }
};

// Scores that are there already, (query rows, rows) in log2, in place of keys.
struct TileScoreKeys {
  const float* scores;
  const int* dims;

  static constexpr int ORDER = 0;
  static constexpr bool aligned = true;
  float s[2][2];

  __device__ __forceinline__ void prepare(int) {}
  __device__ __forceinline__ void begin(const float*, int, DecodeLane) {}
  __device__ __forceinline__ void load(const size_t (&j)[2], int head, int rows, int, DecodeLane at, bool) {
    const int queries = dims[CODED_QUERIES];
    const int first = int(blockIdx.x) % ((queries + TILE_QUERIES - 1) / TILE_QUERIES) * TILE_QUERIES;
    ATTEND_UNROLL
    for (int x = 0; x < 2; x++) {
      const size_t row = size_t(head) * queries + min(first + at.t % 2 * 2 + x, queries - 1);
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        s[r][x] = __ldg(scores + row * dims[CODED_COUNT] + (j[r] - size_t(head) * rows - dims[CODED_KEYS_FROM]));
      }
    }
  }

  template <typename Next>
  __device__ __forceinline__ void dots(float (&found)[2][2], const float*, DecodeLane, Next next) {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      found[i / 2][i % 2] = s[i / 2][i % 2];
    }
    next();
  }
};

}  // namespace kvtool
