// Codebook search in float32. The lowest index wins a tie; a NaN distance wins nothing, so a NaN vector has index 0.
// X and C are pointers of any address space.
namespace kvtool {

// Index of the codeword with the least squared distance. codebook: [count, SUB_DIM].
template <int SUB_DIM, typename X, typename C>
METAL_FUNC uint nearest_codeword(X x, C codebook, int count) {
#pragma METAL fp contract(off)  // one rounding per operation, as in the MLX definition
  float v[SUB_DIM];
  for (int j = 0; j < SUB_DIM; ++j) {
    v[j] = float(x[j]);
  }
  uint best = 0;
  float least = INFINITY;
  for (int i = 0; i < count; ++i) {
    float distance = 0.0f;
    for (int j = 0; j < SUB_DIM; ++j) {
      const float gap = v[j] - float(codebook[i * SUB_DIM + j]);
      const float square = gap * gap;
      distance = distance + square;
    }
    if (distance < least) {
      least = distance;
      best = uint(i);
    }
  }
  return best;
}

// The same in one dimension, without the square: nothing overflows or underflows.
template <typename C>
METAL_FUNC uint nearest_centroid(float x, C centroids, int count) {
  uint best = 0;
  float least = INFINITY;
  for (int i = 0; i < count; ++i) {
    const float distance = metal::abs(x - float(centroids[i]));
    if (distance < least) {
      least = distance;
      best = uint(i);
    }
  }
  return best;
}

// Number of boundaries below x: its cell among sorted centroids, the lower one on a boundary. NaN is in cell 0.
template <typename C>
METAL_FUNC uint cell_of(float x, C boundaries, int count) {
  uint cell = 0;
  for (int i = 0; i < count; ++i) {
    cell += x > float(boundaries[i]) ? 1u : 0u;
  }
  return cell;
}

}  // namespace kvtool

using kvtool::nearest_codeword;
