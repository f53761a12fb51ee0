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

// Sum over the WIDTH lanes of a row; every lane gets it.
template <int WIDTH>
__device__ inline float row_sum(float x) {
#pragma unroll
  for (int stride = 1; stride < WIDTH; stride *= 2) x += __shfl_xor_sync(0xffffffffu, x, stride);
  return x;
}

}  // namespace kvtool
