// Walsh-Hadamard transform (Sylvester order, not normalised) of rows held by one warp: a row takes min(D, 32) lanes,
// and register r of a lane holds element 32 r + lane. Strides ascend, so that every back end adds in the same order.
namespace kvtool {

template <int D, int R>
__device__ inline void hadamard(float (&v)[R], uint32_t lane) {
  static_assert((D & (D - 1)) == 0 && R == (D > 32 ? D / 32 : 1), "D is a power of two, R its registers per lane");
#pragma unroll
  for (int stride = 1; stride < (D < 32 ? D : 32); stride *= 2) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      const float other = __shfl_xor_sync(0xffffffffu, v[r], stride);
      v[r] = (lane & stride) ? other - v[r] : v[r] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < R; step *= 2) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (r & step) continue;
      const float low = v[r], high = v[r + step];
      v[r] = low + high;
      v[r + step] = low - high;
    }
  }
}

// The same transform, and the same sums, of rows held eight elements a lane: a row takes W = min(D / 8, 32) lanes, and v[c][e] of its
// lane l is element 256 c + 8 l + e.
template <int D, int C>
__device__ inline void hadamard_octets(float (&v)[C][8], uint32_t lane) {
  static_assert((D & (D - 1)) == 0 && D >= 8 && C == (D > 256 ? D / 256 : 1), "D is a power of two, C its octets per lane");
  constexpr int W = D < 256 ? D / 8 : 32;
#pragma unroll
  for (int c = 0; c < C; c++) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
      for (int e = 0; e < 8; e++) {
        if (e & step) continue;
        const float low = v[c][e], high = v[c][e + step];
        v[c][e] = low + high;
        v[c][e + step] = low - high;
      }
    }
  }
#pragma unroll
  for (int stride = 1; stride < W; stride *= 2) {
    const float sign = (lane & stride) ? -1.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < C; c++) {
#pragma unroll
      for (int e = 0; e < 8; e++) v[c][e] = fmaf(sign, v[c][e], __shfl_xor_sync(0xffffffffu, v[c][e], stride));
    }
  }
#pragma unroll
  for (int step = 1; step < C; step *= 2) {
#pragma unroll
    for (int c = 0; c < C; c++) {
      if (c & step) continue;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const float low = v[c][e], high = v[c + step][e];
        v[c][e] = low + high;
        v[c + step][e] = low - high;
      }
    }
  }
}

// N consecutive elements, by the largest words that fit them where `aligned` says that the array starts at 16 bytes.
template <int N, typename T>
struct Run {
  static constexpr int BYTES = N * int(sizeof(T)), WORD = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 2;
  union {
    uint4 words16[(BYTES + 15) / 16];
    uint2 words8[(BYTES + 7) / 8];
    uint32_t words4[(BYTES + 3) / 4];
    uint16_t words2[BYTES / 2];
  };

  __device__ inline Run() {}

  __device__ inline void load(const T* from, bool aligned) {
    if (WORD == 2 || !aligned) {
      const uint16_t* each = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
      for (int i = 0; i < BYTES / 2; i++) words2[i] = __ldg(each + i);
      return;
    }
#pragma unroll
    for (int i = 0; i < BYTES / WORD; i++) {
      if (WORD == 16) {
        words16[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
      } else if (WORD == 8) {
        words8[i] = __ldg(reinterpret_cast<const uint2*>(from) + i);
      } else {
        words4[i] = __ldg(reinterpret_cast<const uint32_t*>(from) + i);
      }
    }
  }

  // The first `count` elements, one by one.
  __device__ inline void load_first(const T* from, int count) {
    constexpr int PARTS = int(sizeof(T)) / 2;
    const uint16_t* each = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < BYTES / 2; i++) words2[i] = i < PARTS * count ? __ldg(each + i) : uint16_t(0);
  }

  // The first `count` elements of 16 bits, an even number, in pairs; zeros behind.
  __device__ inline void load_pairs(const T* from, int count) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; i++) words4[i] = 2 * i < count ? __ldg(reinterpret_cast<const uint32_t*>(from) + i) : 0u;
  }

  __device__ inline float operator[](int i) const {
    if (sizeof(T) == 4) return __uint_as_float(words4[i]);
    const uint16_t bits = uint16_t(words4[i / 2] >> (16 * (i % 2)));
    return float(*reinterpret_cast<const T*>(&bits));
  }
};

__device__ inline bool starts_at_16(const void* p) {
  return reinterpret_cast<size_t>(p) % 16 == 0;
}

// Sum over the WIDTH lanes of a row; every lane gets it.
template <int WIDTH>
__device__ inline float row_sum(float x) {
#pragma unroll
  for (int stride = 1; stride < WIDTH; stride *= 2) x += __shfl_xor_sync(0xffffffffu, x, stride);
  return x;
}

}  // namespace kvtool
