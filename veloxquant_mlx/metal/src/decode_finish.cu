// Second pass over rows of 128 channels: the splits of a query row merged, times R. After attend.cu and decode_parts.cu.

namespace kvtool {

constexpr int FINISH_WARPS = 8;

// One block of 8 warps a query row; each warp sums every eighth split, then has an eighth of R's rows. What does not depend on the weights
// is read before they are known. shared: FINISH_WARPS * (DECODE_DIM + 2) floats and `splits` weights, DECODE_DIM at least.
template <typename O>
__device__ __forceinline__ void decode_finish(
    const float* parts, const float* part_lse, const float* rotation, const int* dims, O* out, float* lse, float* shared) {
  constexpr int THREADS = 32 * FINISH_WARPS;
  constexpr int TOGETHER = 8;
  constexpr int EACH = DECODE_DIM / FINISH_WARPS;
  const int thread_ = int(threadIdx.x);
  const int warp = thread_ / 32;
  const int lane = thread_ % 32;
  const int row = int(blockIdx.x);
  const int splits = dims[0];
  const bool turned = dims[1] != 0;
  float* sums = shared;
  float* tops = sums + FINISH_WARPS * DECODE_DIM;
  float* totals = tops + FINISH_WARPS;
  float* weights = totals + FINISH_WARPS;
  part_lse += size_t(row) * splits;
  const float* from = parts + size_t(row) * splits * DECODE_DIM + 4 * lane;

  float4 part[TOGETHER];
  ATTEND_UNROLL
  for (int i = 0; i < TOGETHER; i++) {
    part[i] = *reinterpret_cast<const float4*>(from + size_t(min(warp + i * FINISH_WARPS, splits - 1)) * DECODE_DIM);
  }
  float turn[EACH][4];  // of columns lane, lane + 32, ...
  if (turned) {
    ATTEND_UNROLL
    for (int i = 0; i < EACH; i++) {
      ATTEND_UNROLL
      for (int k = 0; k < 4; k++) {
        turn[i][k] = rotation[(warp * EACH + i) * DECODE_DIM + 32 * k + lane];
      }
    }
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
      part[i] = *reinterpret_cast<const float4*>(from + size_t(min(at + TOGETHER * FINISH_WARPS, splits - 1)) * DECODE_DIM);
      sum.x = fmaf(weight, x.x, sum.x);
      sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z);
      sum.w = fmaf(weight, x.w, sum.w);
    }
  }
  *reinterpret_cast<float4*>(sums + warp * DECODE_DIM + 4 * lane) = sum;
  __syncthreads();
  const int d = thread_ % DECODE_DIM;
  const auto summed = [&] {
    float found = 0;
    ATTEND_UNROLL
    for (int w = 0; w < FINISH_WARPS; w++) {
      found += sums[w * DECODE_DIM + d];
    }
    return found;
  };
  float value = total == 0 ? 0.0f : summed() / total;
  if (turned) {
    float* merged = weights;
    if (thread_ < DECODE_DIM) {
      merged[d] = value;
    }
    __syncthreads();
    float own[4] = {};
    ATTEND_UNROLL
    for (int i = 0; i < EACH; i++) {
      const float x = merged[warp * EACH + i];
      ATTEND_UNROLL
      for (int k = 0; k < 4; k++) {
        own[k] = fmaf(x, turn[i][k], own[k]);
      }
    }
    ATTEND_UNROLL
    for (int k = 0; k < 4; k++) {
      sums[warp * DECODE_DIM + 32 * k + lane] = own[k];
    }
    __syncthreads();
    value = summed();
  }
  if (thread_ < DECODE_DIM) {
    out[size_t(row) * DECODE_DIM + d] = O(value);
  }
  if (thread_ == 0) {
    lse[row] = total == 0 ? -ATTEND_INF : top + logf(total);
  }
}

}  // namespace kvtool
