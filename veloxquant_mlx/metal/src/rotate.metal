// Walsh-Hadamard transform (Sylvester order, not normalised) of rows held by one SIMD-group: a row takes min(D, 32) lanes,
// and register r of a lane holds element 32 r + lane. Strides ascend, so that every back end adds in the same order.
namespace kvtool {

template <int D, int R>
inline void hadamard(thread float (&v)[R], ushort lane) {
  static_assert((D & (D - 1)) == 0 && R == (D > 32 ? D / 32 : 1), "D is a power of two, R its registers per lane");
  for (ushort stride = 1; stride < (D < 32 ? D : 32); stride *= 2) {
    for (int r = 0; r < R; r++) {
      const float other = simd_shuffle_xor(v[r], stride);
      v[r] = (lane & stride) ? other - v[r] : v[r] + other;
    }
  }
  for (int step = 1; step < R; step *= 2) {
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
inline float row_sum(float x) {
  for (ushort stride = 1; stride < WIDTH; stride *= 2) x += simd_shuffle_xor(x, stride);
  return x;
}

}  // namespace kvtool
