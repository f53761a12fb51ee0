// Quantised Johnson-Lindenstrauss: signs of projections, LSB first, and the estimate of an inner product from them.
namespace kvtool {

// One warp: the signs of 32 projections for each of 4 rows; the warp of block 0 also takes their norms.
// x: [rows, dim]; transposed: [dim, projections], so that neighbouring lanes read neighbouring values.
template <typename T, typename P, typename O>
__device__ inline void qjl_encode(
    const T* x,
    const P* transposed,
    uint8_t* packed,
    O* norms,
    int rows,
    int dim,
    int projections,
    unsigned block,
    unsigned row_block,
    unsigned lane) {
  constexpr int ROWS = 4;
  const int first = int(row_block) * ROWS;
  if (first >= rows) {  // the whole warp
    return;
  }
  const int column = int(block * 32 + lane);
  const bool live = column < projections;
  float sums[ROWS] = {0.0f};
  for (int k = 0; k < dim; ++k) {
    const float s = live ? float(transposed[size_t(k) * size_t(projections) + size_t(column)]) : 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sums[r] += s * float(x[size_t(min(first + r, rows - 1)) * size_t(dim) + size_t(k)]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const unsigned word = __ballot_sync(0xffffffffu, live && sums[r] >= 0.0f);
    if (first + r < rows && live && lane % 8 == 0) {
      packed[size_t(first + r) * size_t(projections / 8) + size_t(column / 8)] = uint8_t(word >> lane & 0xFF);
    }
  }
  if (block > 0) {
    return;
  }
  for (int r = 0; r < ROWS && first + r < rows; ++r) {
    float sum = 0.0f;
    for (int k = int(lane); k < dim; k += 32) {
      const float value = float(x[size_t(first + r) * size_t(dim) + size_t(k)]);
      sum += value * value;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (lane == 0) {
      norms[first + r] = O(sqrtf(sum));
    }
  }
}

// scores[head, slot] = sqrt(pi / 2) / m * norms[slot, head] * sum of +-query[head, j]; one slot and head per thread.
template <typename T, typename N, typename O>
__device__ inline void qjl_inner_product(
    const T* query,
    const uint8_t* packed,
    const N* norms,
    O* scores,
    int slots,
    int heads,
    int projections,
    unsigned slot,
    unsigned head) {
  if (slot >= unsigned(slots) || head >= unsigned(heads)) {
    return;
  }
  const size_t row = size_t(slot) * size_t(heads) + size_t(head);
  const uint8_t* signs = packed + row * size_t(projections / 8);
  const T* q = query + size_t(head) * size_t(projections);
  float sum = 0.0f;
  for (int j = 0; j < projections; j += 8) {
    const unsigned byte = signs[j / 8];
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const float value = float(q[j + t]);
      sum += (byte >> t & 1) != 0 ? value : -value;
    }
  }
  scores[size_t(head) * size_t(slots) + size_t(slot)] = O(1.2533141373155003f / float(projections) * sum * float(norms[row]));
}

}  // namespace kvtool
