// The angles that keys before RoPE are rotated by, for `coded_tiles`. After coded_parts.cu.
//
// The warps of HB heads take the same rows: each brings a share of a tile's angles to shared memory while the tile before is worked on,
// in the order in which lanes use them.

namespace kvtool {

// Keys as cached.
struct TileNoTurns {
  __device__ __forceinline__ void copy(int, int) {}
  __device__ __forceinline__ void arrange(unsigned, int, int) {}
  __device__ __forceinline__ const float* of(unsigned, DecodeLane) const {
    return nullptr;
  }
};

// Cosines and sines, or (TURN) P and M, of 16 rows. ORDER: as of TileQuery.
template <int HB, int WARPS, int ORDER, bool TURN>
struct TileTurns {
  static constexpr unsigned THREADS = 32 * HB;
  static constexpr unsigned UNITS = TILE_ROWS * TILE_DIM / 8;  // of 4 pairs
  static constexpr unsigned RAW = HB == 1 ? 0 : TILE_ROWS * TILE_DIM;
  static constexpr unsigned READY = TILE_ROWS * TILE_TURNS;
  static constexpr unsigned BUFFERS = HB == 1 ? 1 : 2;
  static constexpr unsigned FLOATS = RAW + BUFFERS * READY;

  const float* angles;  // cosines and sines, 64 each a row
  float* raw;           // as they are in memory: a warp that is alone reads that
  float* ready;
  unsigned split;
  unsigned thread_;
  uint32_t negative;  // TURN: of this thread's pairs, bits 31 to 28

  __device__ __forceinline__ TileTurns(const float* angles_, const float* signs, char* memory)
      : angles(angles_), split(threadIdx.x / THREADS), thread_(threadIdx.x % THREADS), negative(0) {
    raw = reinterpret_cast<float*>(memory) + split * FLOATS;
    ready = raw + RAW;
    ATTEND_UNROLL
    for (unsigned i = 0; i < 4 && TURN; i++) {
      negative |= signs[pair(i)] < 0 ? 0x80000000u >> i : 0u;
    }
  }

  // The channels of this thread's four pairs.
  __device__ __forceinline__ unsigned pair(unsigned i) const {
    const unsigned run = thread_ % 16 / 2 * 8, x = thread_ % 2;
    return run + (ORDER == 1 ? 2 * x + 4 * (i / 2) : 4 * x + 2 * (i / 2)) + i % 2;
  }

  __device__ __forceinline__ void meet() const {
    if (HB == 1) {
      __syncwarp();
    } else if (HB == WARPS) {
      __syncthreads();
    } else {
      decode_meet(1 + int(split), int(THREADS));
    }
  }

  __device__ __forceinline__ const float* row_of(int row, int last) const {
    return angles + size_t(min(max(row, 0), last)) * TILE_DIM;
  }

  // Start to copy the angles of a tile whose first row is `base` rows after the first of all; rows beyond 0 or `last` repeat those.
  __device__ __forceinline__ void copy(int base, int last) {
    ATTEND_UNROLL
    for (unsigned p = 0; p < UNITS / THREADS && HB > 1; p++) {
      const unsigned row = (p * THREADS + thread_) / 16;
      const unsigned pair = thread_ % 16 * 4;
      const float* from = row_of(base + int(row), last) + pair;
      float* to = raw + row * TILE_DIM + pair;
      decode_copy(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from));
      decode_copy(reinterpret_cast<char*>(to + TILE_DIM / 2), reinterpret_cast<const char*>(from + TILE_DIM / 2));
    }
  }

  // Once no warp uses the tile before the last one: what was copied, in order. All warps of a split meet.
  __device__ __forceinline__ void arrange(unsigned tile, int base, int last) {
    decode_arrived();
    ATTEND_UNROLL
    for (unsigned p = 0; p < UNITS / THREADS; p++) {
      const unsigned row = (p * THREADS + thread_) / 16;
      const unsigned run = thread_ % 16 / 2;
      const unsigned x = thread_ % 2;
      const unsigned first = pair(0);
      const unsigned second = pair(2);
      const float* from = HB == 1 ? row_of(base + int(row), last) : raw + row * TILE_DIM;
      float2 cosine[2] = {*reinterpret_cast<const float2*>(from + first), *reinterpret_cast<const float2*>(from + second)};
      from += TILE_DIM / 2;
      float2 sine[2] = {*reinterpret_cast<const float2*>(from + first), *reinterpret_cast<const float2*>(from + second)};
      if (TURN) {
        ATTEND_UNROLL
        for (int i = 0; i < 2; i++) {
          const float2 c = cosine[i];
          const float s0 = __uint_as_float(__float_as_uint(sine[i].x) ^ (negative << (2 * i) & 0x80000000u));
          const float s1 = __uint_as_float(__float_as_uint(sine[i].y) ^ (negative << (2 * i + 1) & 0x80000000u));
          cosine[i] = make_float2(c.x - s0, c.y - s1);
          sine[i] = make_float2(c.x + s0, c.y + s1);
        }
      }
      const unsigned third = TURN ? run / 4 : run % 2;
      const unsigned t = TURN ? run % 4 : run / 2;
      float* to = ready + tile % BUFFERS * READY + row * TILE_TURNS + tile_turn(int(third), int(2 * x), int(TURN ? t : t ^ (2 * third)));
      constexpr bool NEXT = ORDER == 4;  // the two of a lane are neighbours
      const float4 even = NEXT ? float4{cosine[0].x, cosine[0].y, sine[0].x, sine[0].y}
                               : float4{cosine[0].x, cosine[1].x, sine[0].x, sine[1].x};
      const float4 odd = NEXT ? float4{cosine[1].x, cosine[1].y, sine[1].x, sine[1].y}
                              : float4{cosine[0].y, cosine[1].y, sine[0].y, sine[1].y};
      *reinterpret_cast<float4*>(to) = even;
      *reinterpret_cast<float4*>(to + 2 * TILE_TURN) = odd;
    }
    meet();
  }

  // The angles of row g of a tile; those of row g + 8 are 8 * TILE_TURNS further.
  __device__ __forceinline__ const float* of(unsigned tile, DecodeLane at) const {
    return ready + tile % BUFFERS * READY + at.g * TILE_TURNS;
  }
};

}  // namespace kvtool
