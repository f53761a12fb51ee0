// Second pass of `coded_tiles`: the splits of a query row merged, times R. After attend.cu and coded_parts.cu.

namespace kvtool {

constexpr int FINISH_WARPS = 8;

// One block of 8 warps a query row; each warp sums every eighth split. shared: `splits` weights and FINISH_WARPS * (TILE_DIM + 2) floats.
__device__ __forceinline__ void coded_finish(
    const float* parts, const float* part_lse, const float* rotation, const int* dims, float* out, float* lse, float* shared) {
  constexpr int THREADS = 32 * FINISH_WARPS;
  constexpr int TOGETHER = 8;
  const int thread_ = int(threadIdx.x);
  const int warp = thread_ / 32;
  const int lane = thread_ % 32;
  const int row = int(blockIdx.x);
  const int splits = dims[0];
  float* sums = shared;
  float* tops = sums + FINISH_WARPS * TILE_DIM;
  float* totals = tops + FINISH_WARPS;
  float* weights = totals + FINISH_WARPS;
  part_lse += size_t(row) * splits;
  const float* from = parts + size_t(row) * splits * TILE_DIM + 4 * lane;

  float4 part[TOGETHER];  // read before the weights are known
  ATTEND_UNROLL
  for (int i = 0; i < TOGETHER; i++) {
    part[i] = *reinterpret_cast<const float4*>(from + size_t(min(warp + i * FINISH_WARPS, splits - 1)) * TILE_DIM);
  }
  float top = -ATTEND_INF;
  for (int i = thread_; i < splits; i += THREADS) {
    weights[i] = part_lse[i];
    top = fmaxf(top, weights[i]);
  }
  ATTEND_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
  }
  if (lane == 0) {
    tops[warp] = top;
  }
  __syncthreads();
  ATTEND_UNROLL
  for (int w = 0; w < FINISH_WARPS; w++) {
    top = fmaxf(top, tops[w]);
  }
  float total = 0;
  for (int i = thread_; i < splits; i += THREADS) {
    // A split with -inf saw nothing; one with NaN has to reach the sum.
    weights[i] = weights[i] == -ATTEND_INF ? 0.0f : expf(weights[i] - (top == -ATTEND_INF ? 0.0f : top));
    total += weights[i];
  }
  ATTEND_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, offset);
  }
  if (lane == 0) {
    totals[warp] = total;
  }
  __syncthreads();
  total = 0;
  ATTEND_UNROLL
  for (int w = 0; w < FINISH_WARPS; w++) {
    total += totals[w];
  }
  float4 sum = {};
  for (int first = warp; first < splits; first += TOGETHER * FINISH_WARPS) {
    ATTEND_UNROLL
    for (int i = 0; i < TOGETHER; i++) {
      const int at = first + i * FINISH_WARPS;
      const float weight = at < splits ? weights[at] : 0.0f;
      const float4 x = part[i];
      part[i] = *reinterpret_cast<const float4*>(from + size_t(min(at + TOGETHER * FINISH_WARPS, splits - 1)) * TILE_DIM);
      sum.x = fmaf(weight, x.x, sum.x);
      sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z);
      sum.w = fmaf(weight, x.w, sum.w);
    }
  }
  *reinterpret_cast<float4*>(sums + warp * TILE_DIM + 4 * lane) = sum;
  __syncthreads();
  const int d = thread_ % TILE_DIM;
  float value = 0;
  ATTEND_UNROLL
  for (int w = 0; w < FINISH_WARPS; w++) {
    value += sums[w * TILE_DIM + d];
  }
  value = total == 0 ? 0.0f : value / total;
  if (dims[1]) {
    constexpr int EACH = TILE_DIM * TILE_DIM / THREADS;  // of a column of R, in each half of the block
    const int first = thread_ / TILE_DIM * EACH;
    __syncthreads();
    if (first == 0) {
      sums[d] = value;
    }
    __syncthreads();
    value = 0;
    _Pragma("unroll 16")
    for (int i = first; i < first + EACH; i++) {
      value = fmaf(sums[i], rotation[i * TILE_DIM + d], value);
    }
    sums[TILE_DIM + thread_] = value;
    __syncthreads();
    value = sums[TILE_DIM + d] + sums[2 * TILE_DIM + d];
  }
  if (thread_ < TILE_DIM) {
    out[size_t(row) * TILE_DIM + d] = value;
  }
  if (thread_ == 0) {
    lse[row] = total == 0 ? -ATTEND_INF : top + logf(total);
  }
}

}  // namespace kvtool
