// `coded_attend` on tensor cores: few queries, rows of 128 channels, codes of up to 4 bits.
// After attend.cu, coded_rows.cu and decode_parts.cu.
//
// A warp owns up to 4 queries of one KV head and takes 16 rows at a time; the warps of a block take as many heads as there are, up to 8, so
// that the angles that all heads share are read from memory once. All products are mma.m16n8k16 on halves with float32 sums. What is no
// half is the sum of two (x = near + rest, 22 bits): queries and weights in the columns of one product, table entries and rotated keys in
// two products, or in the rows of one.
//
// Lane = 4 g + t. Channels of a key are named by their bits 6 to 0. As stored, lane t has bits (5, 4) = t; a product contracts these, bit 3
// and one of the low bits, e, which is that of two neighbours in a byte of codes; the other low bits, x and y, and bit 6 count products.
// Keys before RoPE whose codes follow a Walsh-Hadamard transform are turned back by products with the signs of these four bits and of x,
// sums and differences over y, and, over bit 6, within the rotation: with a = u + v and b = u - v
//     cos a - sin b = P u + M v,    sin a + cos b = M u - P v,    P = cos - sin, M = cos + sin
// where sin has the sign of the pair. Then lane t has bits (4, 3) = t, and bit 5 is among the products.

namespace kvtool {

constexpr int TILE_DIM = 128;
constexpr int TILE_ROWS = 16;
constexpr int TILE_QUERIES = 4;
constexpr int TILE_TABLE = 65536;  // bytes of shared memory of the keys' table; then the values'
constexpr int TILE_ZEROS = TILE_DIM;  // floats of shared memory that are 0
constexpr int TILE_TURN = 16;               // floats from the angles of 8 pairs of channels to the next
constexpr int TILE_TURNS = 8 * TILE_TURN + 16;  // from a row's angles to the next

// The low bits of a channel: e is bit 0 of codes of 4 bits, bit 1 of 2, bit 2 of 1.
template <int BITS>
__device__ __forceinline__ constexpr int tile_low(int x, int y, int e) {
  return BITS == 4 ? 4 * x + 2 * y + e : BITS == 2 ? 4 * x + 2 * e + y : 4 * e + 2 * x + y;
}

// Where the angles of a lane's pairs are in a row's: y before x, so that the lanes which write them meet no bank twice.
__device__ __forceinline__ int tile_turn(int third, int u, int t) {
  return (4 * third + u % 2 * 2 + u / 2) * TILE_TURN + 4 * t;
}

// Two floats as halves, and what is left of them.
__device__ __forceinline__ void tile_split(float x, float y, uint32_t& near, uint32_t& rest) {
  const __half2 h = __floats2half2_rn(x, y);
  const float2 back = __half22float2(h);
  const __half2 left = __floats2half2_rn(x - back.x, y - back.y);
  near = *reinterpret_cast<const uint32_t*>(&h);
  rest = *reinterpret_cast<const uint32_t*>(&left);
}

// Tables begin where addresses of shared memory are a multiple of TILE_TABLE.
__device__ __forceinline__ char* tile_tables() {
  return decode_memory() + (-decode_address(decode_memory()) & (TILE_TABLE - 1));
}

// What the address of a pair has of this lane and of the table: `tile_pair` puts a byte of codes between.
template <int AT>
__device__ __forceinline__ uint32_t tile_place(DecodeLane at) {
  return decode_address(tile_tables()) + AT + uint32_t(at.lane) * 4;
}

// The pair that a byte of codes names: of keys AT = 0, of values AT = TILE_TABLE. 256 bytes a pair: halves for each of 32 lanes, then what
// is left of them. Two loads, since a product takes them in registers that are not neighbours.
__device__ __forceinline__ void tile_pair(uint32_t codes, uint32_t place, int byte, uint32_t& near, uint32_t& rest) {
  const uint32_t from = __byte_perm(codes, place, 0x7604u + 16u * uint32_t(byte));
  near = decode_load<0>(from);
  rest = decode_load<128>(from);
}

// Entry of a number of 4 bits: of one code, or of two of 2 bits.
template <int BITS, bool TWO>
__device__ __forceinline__ float tile_entry(const float* table, int code) {
  const float one = table[code & ((1 << BITS) - 1)];
  return TWO ? one + table[4 + code / 4] : one;
}

// Fill a table of pairs. The largest entry becomes 1 to 2 times `unit`.
template <int AT, int BITS, bool TWO>
__device__ __forceinline__ void tile_fill(const float* table, float& unit, int threads) {
  const int lane = int(threadIdx.x) % 32;
  float largest = fabsf(tile_entry<BITS, TWO>(table, lane % 16));
  ATTEND_UNROLL
  for (int offset = 8; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  float inverse;
  decode_unit(largest, unit, inverse);
  for (int i = int(threadIdx.x); i < 256; i += threads) {
    uint32_t near;
    uint32_t rest;
    tile_split(tile_entry<BITS, TWO>(table, i % 16) * inverse, tile_entry<BITS, TWO>(table, i / 16) * inverse, near, rest);
    ATTEND_UNROLL
    for (int k = 0; k < 8; k++) {
      char* to = tile_tables() + AT + i * 256 + (i + k) % 8 * 16;
      *reinterpret_cast<uint4*>(to) = make_uint4(near, near, near, near);
      *reinterpret_cast<uint4*>(to + 128) = make_uint4(rest, rest, rest, rest);
    }
  }
}

// A number of halves as words of two.
template <int WORDS>
__device__ __forceinline__ void tile_halves(uint32_t* words, const __half* from, bool aligned) {
  ATTEND_UNROLL
  for (int w = 0; w < WORDS; w += 4) {
    if (aligned) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + w / 4);
      words[w] = four.x;
      words[w + 1] = four.y;
      words[w + 2] = four.z;
      words[w + 3] = four.w;
    } else {
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        const uint16_t* pair = reinterpret_cast<const uint16_t*>(from) + 2 * (w + i);
        words[w + i] = __ldg(pair) | uint32_t(__ldg(pair + 1)) << 16;
      }
    }
  }
}

// Fill a table with 256 vectors of SUB channels, for each of 32 / SUB lanes: near and rest of 4 channels, then of the next.
template <int AT, int SUB>
__device__ __forceinline__ void tile_fill_words(const float* table, float& unit, int threads) {
  float largest = 0;
  for (int i = int(threadIdx.x) % 32; i < 256 * SUB; i += 32) {
    largest = fmaxf(largest, fabsf(table[i]));
  }
  ATTEND_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  float inverse;
  decode_unit(largest, unit, inverse);
  for (int i = int(threadIdx.x); i < 256; i += threads) {
    ATTEND_UNROLL
    for (int part = 0; part < SUB / 4; part++) {
      const float* x = table + i * SUB + 4 * part;
      uint4 word;
      tile_split(x[0] * inverse, x[1] * inverse, word.x, word.z);
      tile_split(x[2] * inverse, x[3] * inverse, word.y, word.w);
      ATTEND_UNROLL
      for (int k = 0; k < 32 / SUB; k++) {
        *reinterpret_cast<uint4*>(tile_tables() + AT + i * 256 + k * (4 * SUB) + 16 * part) = word;
      }
    }
  }
}

// 4 channels, from 4 `part` on, of the vector that byte `byte` of codes names: near (x, y) and rest (z, w).
template <int AT, int SUB>
__device__ __forceinline__ uint4 tile_word(uint32_t codes, int byte, int part, DecodeLane at) {
  const uint32_t from = (codes >> (8 * byte) & 255u) * 256 + uint32_t(at.lane % (32 / SUB)) * (4 * SUB) + 16 * part;
  return *reinterpret_cast<const uint4*>(tile_tables() + AT + from);
}

// Codes of one row as numbers of 4 bits: HALVES runs of 16 channels.
template <int BITS, bool TWO, int HALVES>
struct TileCodes {
  static constexpr int BYTES = 2 * BITS;
  static constexpr int EACH = BITS == 4 ? 2 : 1;
  uint32_t one[HALVES * EACH];
  uint32_t two[TWO ? HALVES : 1];

  __device__ __forceinline__ void load(const uint8_t* codes1, const uint8_t* codes2, size_t row, int at, bool aligned) {
    const size_t from = row * (TILE_DIM / 8 * BITS) + at * BYTES;
    ATTEND_UNROLL
    for (int half = 0; half < HALVES; half++) {
      coded_words<BYTES>(one + half * EACH, codes1 + from + half * (TILE_DIM / 16 * BITS), aligned);
      if (TWO) {
        coded_words<BYTES>(two + half, codes2 + from + half * (TILE_DIM / 16 * BITS), aligned);
      }
    }
  }

  // Every other channel of a run's 2-bit codes (from channel `odd` on); of 4-bit codes, 8 channels from 8 `odd` on.
  __device__ __forceinline__ uint32_t numbers(int half, int odd) const {
    if (BITS == 4) {
      return one[half * EACH + (BITS == 4 ? odd : 0)];
    }
    const uint32_t first = odd ? one[half] >> 2 : one[half];
    if (TWO) {
      return decode_choose(first, odd ? two[TWO ? half : 0] : two[TWO ? half : 0] << 2, 0x33333333u);
    }
    return first & 0x33333333u;
  }

  // Channels whose bit 6 is `half`, bit 3 `high`, of x and y: the word and the byte of their pair, low bit e = 0 and 1.
  __device__ __forceinline__ uint32_t word(int half, int x, int y, int high) const {
    if (BITS == 1) {
      const uint32_t both = HALVES == 2 ? one[0] | one[HALVES - 1] << 16 : one[0];
      return both >> (2 * x + y) & 0x11111111u;
    }
    return numbers(half, BITS == 4 ? high : y);
  }
  static __device__ __forceinline__ constexpr int byte(int half, int x, int y, int high) {
    return BITS == 4 ? 2 * x + y : BITS == 2 ? 2 * high + x : 2 * half + high;
  }
};

// Queries as columns of products: 0 to 3 near, 4 to 7 what is left of them; each over a power of two. ORDER: as BITS of tile_low.
template <int ORDER, bool TURN>
struct TileQuery {
  uint32_t x[8][2];
  float inverse;

  // Where 8 channels begin (but for bit 6) that lane t has; `third` is the bit that tells the two halves of a product apart: 3, or 5 where
  // keys are turned.
  static __device__ __forceinline__ int run(int third, int t) {
    return TURN ? 32 * third + 8 * t : 16 * t + 8 * third;
  }

  // Row `row` is of head g % 4; returns the factors of the heads whose columns this lane has.
  __device__ __forceinline__ void bring(const float* row, DecodeLane at, float (&factor)[2]) {
    float own[32];  // runs of 8, of bits 6 and `third`
    ATTEND_UNROLL
    for (int i = 0; i < 32; i += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(row + 64 * (i / 16) + run(i / 8 % 2, at.t) + i % 8));
      own[i] = four.x;
      own[i + 1] = four.y;
      own[i + 2] = four.z;
      own[i + 3] = four.w;
    }
    float largest = 0;
    ATTEND_UNROLL
    for (int i = 0; i < 32; i++) {
      largest = fmaxf(largest, fabsf(own[i]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    float size;
    decode_unit(largest, size, inverse);
    ATTEND_UNROLL
    for (int i = 0; i < 16; i++) {
      const int u = i / 2;
      const float* from = own + 16 * (u / 4) + 8 * (i % 2);
      put(u, i % 2, from[tile_low<ORDER>(u / 2 % 2, u % 2, 0)] * inverse, from[tile_low<ORDER>(u / 2 % 2, u % 2, 1)] * inverse, at);
    }
    of_heads(size, at, factor);
  }

  __device__ __forceinline__ void put(int u, int third, float first, float second, DecodeLane at) {
    x[u][third] = decode_halves(first, second, at.g >= 4 ? 0xffffffffu : 0u);
  }

  // A number of head g % 4, the same in all t, to the lanes whose columns are that head's.
  static __device__ __forceinline__ void of_heads(float own, DecodeLane at, float (&found)[2]) {
    found[0] = __shfl_sync(0xffffffffu, own, 4 * (at.t % 2 * 2));
    found[1] = __shfl_sync(0xffffffffu, own, 4 * (at.t % 2 * 2 + 1));
  }

  __device__ __forceinline__ void multiply(float (&c)[4], int u, const uint32_t (&a)[4]) const {
    decode_mma(c, a[0], a[1], a[2], a[3], x[u][0], x[u][1]);
  }

  // Products with keys in float32 of two rows, channels that differ in bit 6: (bit 3, (row, e)), which are rotated.
  __device__ __forceinline__ void turn_and_multiply(
      float (&c)[4], int u, float (&a)[2][4], float (&b)[2][4], const float* turns, int t) const {
    ATTEND_UNROLL
    for (int third = 0; third < 2; third++) {
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        const float4 turn = *reinterpret_cast<const float4*>(turns + 8 * r * TILE_TURNS + tile_turn(third, u, TURN ? t : t ^ (2 * third)));
        ATTEND_UNROLL
        for (int e = 0; e < 2; e++) {
          const float cosine = e ? turn.y : turn.x;
          const float sine = e ? turn.w : turn.z;
          const float x0 = a[third][2 * r + e];
          const float x1 = b[third][2 * r + e];
          a[third][2 * r + e] = fmaf(cosine, x0, -sine * x1);
          b[third][2 * r + e] = fmaf(cosine, x1, sine * x0);
        }
      }
    }
    ATTEND_UNROLL
    for (int half = 0; half < 2; half++) {
      uint32_t near[4];
      uint32_t rest[4];
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        const float(&y)[4] = half ? b[i / 2] : a[i / 2];
        tile_split(y[i % 2 * 2], y[i % 2 * 2 + 1], near[i], rest[i]);
      }
      multiply(c, u + 4 * half, near);
      multiply(c, u + 4 * half, rest);
    }
  }
};

// Columns that hold what is left of queries or weights, to those that hold the rest of them.
__device__ __forceinline__ float tile_whole(float x) {
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The running softmax of a warp: this lane's columns are heads 2 (t % 2) and the next. Sums of values are over units of their own.
struct TileState {
  float m[2];
  float l[2];
  float centred[2];
  float zero[2][4];  // of affine values: sums of zeros, by groups of channels
  float o[8][4];

  __device__ __forceinline__ void clear() {
    ATTEND_UNROLL
    for (int x = 0; x < 2; x++) {
      m[x] = -ATTEND_INF;
      l[x] = centred[x] = 0;
      zero[x][0] = zero[x][1] = zero[x][2] = zero[x][3] = 0;
    }
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
    }
  }

  // Scores in log2, -inf where not visible, become weights.
  __device__ __forceinline__ void weigh(float (&s)[2][2]) {
    float top[2] = {fmaxf(s[0][0], s[1][0]), fmaxf(s[0][1], s[1][1])};
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
        centred[x] *= keep[x];
        ATTEND_UNROLL
        for (int c = 0; c < 4; c++) {
          zero[x][c] *= keep[x];
        }
      }
      ATTEND_UNROLL
      for (int i = 0; i < 8; i++) {
        o[i][0] *= keep[0];
        o[i][1] *= keep[1];
        o[i][2] *= keep[0];
        o[i][3] *= keep[1];
      }
    }
    ATTEND_UNROLL
    for (int x = 0; x < 2; x++) {
      const float base = m[x] == -ATTEND_INF ? 0.0f : m[x] - DECODE_LIFT;
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        s[r][x] = decode_exp2(s[r][x] - base);
        l[x] += s[r][x];
      }
    }
  }
};

}  // namespace kvtool
