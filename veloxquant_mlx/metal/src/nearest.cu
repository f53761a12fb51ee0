// Codebook search in float32. The lowest index wins a tie; a NaN distance wins nothing, so a NaN vector has index 0.
namespace kvtool {

// Index of the codeword with the least squared distance. codebook: [count, SUB_DIM].
template <int SUB_DIM, typename X, typename C>
__device__ inline unsigned nearest_codeword(const X* x, const C* codebook, int count) {
  float v[SUB_DIM];
#pragma unroll
  for (int j = 0; j < SUB_DIM; ++j) {
    v[j] = float(x[j]);
  }
  unsigned best = 0;
  float least = __int_as_float(0x7f800000);
  for (int i = 0; i < count; ++i) {
    float distance = 0.0f;
#pragma unroll
    for (int j = 0; j < SUB_DIM; ++j) {
      // One rounding per operation, as in the MLX definition: these are never contracted.
      const float gap = __fsub_rn(v[j], float(codebook[i * SUB_DIM + j]));
      distance = __fadd_rn(distance, __fmul_rn(gap, gap));
    }
    if (distance < least) {
      least = distance;
      best = unsigned(i);
    }
  }
  return best;
}

// The same in one dimension, without the square: nothing overflows or underflows.
template <typename C>
__device__ inline unsigned nearest_centroid(float x, const C* centroids, int count) {
  unsigned best = 0;
  float least = __int_as_float(0x7f800000);
  for (int i = 0; i < count; ++i) {
    const float distance = fabsf(x - float(centroids[i]));
    if (distance < least) {
      least = distance;
      best = unsigned(i);
    }
  }
  return best;
}

// Number of boundaries below x: its cell among sorted centroids, the lower one on a boundary. NaN is in cell 0.
template <typename C>
__device__ inline unsigned cell_of(float x, const C* boundaries, int count) {
  unsigned cell = 0;
  for (int i = 0; i < count; ++i) {
    cell += x > float(boundaries[i]) ? 1u : 0u;
  }
  return cell;
}

}  // namespace kvtool

using kvtool::nearest_codeword;
