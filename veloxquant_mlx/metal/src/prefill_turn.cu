// Results of prefill_tiles.cu times R, D x D, on the tensor cores. Both are bfloat16 and what rounding left of them, in bfloat16 too: three
// products, each with sums in float32, keep 16 bits. R takes the place of the tiles in shared memory.

namespace kvtool {

// Two floats as bfloat16, and what rounding leaves of those that are finite.
__device__ __forceinline__ void tile_split(float x, float y, uint32_t& near, uint32_t& rest) {
  near = tile_pair(x, y, __nv_bfloat16());
  const float x_left = x - __uint_as_float(near << 16), y_left = y - __uint_as_float(near & 0xffff0000u);
  rest = tile_pair(isfinite(x) ? x_left : 0.0f, isfinite(y) ? y_left : 0.0f, __nv_bfloat16());
}

// R in tiles of 64 rows: rounded, then the rest. For the whole block.
template <int D>
__device__ __forceinline__ void tile_stage_turn(const float* rotation, char* memory) {
  __syncthreads();  // the last tile has been read
#pragma unroll 4
  for (int i = 0; i < D * D / 8 / TILE_THREADS; i++) {
    const int x = threadIdx.x + i * TILE_THREADS, row = x / (D / 8), c = x % (D / 8);
    const float* from = rotation + x * 8;
    uint32_t near[4], rest[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      tile_split(from[2 * e], from[2 * e + 1], near[e], rest[e]);
    }
    char* place = memory + row / TILE_KEYS * (TILE_KEYS * D * 2) + tile_at<TILE_KEYS>(row % TILE_KEYS, c);
    *reinterpret_cast<uint4*>(place) = make_uint4(near[0], near[1], near[2], near[3]);
    *reinterpret_cast<uint4*>(place + D * D * 2) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
  }
  __syncthreads();
}

// Rows of this warp, o[m] laid out as the sums are, times R; store(m, h, d, x, y) gets results of channels d and d + 1.
template <int D, typename Store>
__device__ __forceinline__ void tile_turn(
    const float (&o0)[D / 8][4], const float (&o1)[D / 8][4], const char* memory, int lane, Store store) {
  bool odd = false;
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      odd = odd || !isfinite(o0[n][e]) || !isfinite(o1[n][e]);
    }
  }
  odd = __any_sync(PREFILL_ALL, odd);
  uint32_t near[2][D / 16][4], rest[2][D / 16][4];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int n = 2 * k + e / 2, h = e % 2 * 2;
      tile_split(o0[n][h], o0[n][h + 1], near[0][k][e], rest[0][k][e]);
      tile_split(o1[n][h], o1[n][h + 1], near[1][k][e], rest[1][k][e]);
    }
  }
  const char* b_row = memory + (lane / 8 % 2 * 8 + lane % 8) * 128;
  const int b_turn = (lane / 16 ^ lane % 8) * 16;
#pragma unroll 1
  for (int n = 0; n < D / 16; n++) {
    float c[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      const char* from = b_row + k / 4 * (TILE_KEYS * D * 2) + n / 4 * (TILE_KEYS * 128) + k % 4 * (16 * 128) + (b_turn ^ n % 4 * 32);
      uint32_t b[4], b_rest[4];
      tile_columns(b, from);
      tile_columns(b_rest, from + D * D * 2);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        tile_mma(c[0][j], near[0][k], b[2 * j], b[2 * j + 1], __nv_bfloat16());
        tile_mma(c[1][j], near[1][k], b[2 * j], b[2 * j + 1], __nv_bfloat16());
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        tile_mma(c[0][j], rest[0][k], b[2 * j], b[2 * j + 1], __nv_bfloat16());
        tile_mma(c[1][j], rest[1][k], b[2 * j], b[2 * j + 1], __nv_bfloat16());
      }
      if (!odd) {  // an infinity times what is left of R, of either sign, would be lost with its product with R
#pragma unroll
        for (int j = 0; j < 2; j++) {
          tile_mma(c[0][j], near[0][k], b_rest[2 * j], b_rest[2 * j + 1], __nv_bfloat16());
          tile_mma(c[1][j], near[1][k], b_rest[2 * j], b_rest[2 * j + 1], __nv_bfloat16());
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          store(m, h, 16 * n + 8 * j, c[m][j][2 * h], c[m][j][2 * h + 1]);
        }
      }
    }
  }
}

}  // namespace kvtool
