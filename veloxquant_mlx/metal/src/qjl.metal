// Quantised Johnson-Lindenstrauss: signs of projections, LSB first, and the estimate of an inner product from them.
namespace kvtool {

// One SIMD-group: the signs of 32 projections for each of 4 rows; the group of block 0 also takes their norms.
// x: [rows, dim]; transposed: [dim, projections], so that neighbouring lanes read neighbouring values.
template <typename T, typename P, typename O>
METAL_FUNC void qjl_encode(
    const device T* x,
    const device P* transposed,
    device uchar* packed,
    device O* norms,
    int rows,
    int dim,
    int projections,
    uint block,
    uint row_block,
    uint lane) {
  constexpr int ROWS = 4;
  const int first = int(row_block) * ROWS;
  if (first >= rows) {  // the whole SIMD-group
    return;
  }
  const int column = int(block * 32 + lane);
  const bool live = column < projections;
  float sums[ROWS] = {0};
  for (int k = 0; k < dim; ++k) {
    const float s = live ? float(transposed[size_t(k) * size_t(projections) + size_t(column)]) : 0.0f;
    for (int r = 0; r < ROWS; ++r) {
      sums[r] += s * float(x[size_t(metal::min(first + r, rows - 1)) * size_t(dim) + size_t(k)]);
    }
  }
  for (int r = 0; r < ROWS && first + r < rows; ++r) {
    const uint word = uint(simd_vote::vote_t(simd_ballot(live && sums[r] >= 0.0f)));
    if (live && lane % 8 == 0) {
      packed[size_t(first + r) * size_t(projections / 8) + size_t(column / 8)] = uchar(word >> lane & 0xFF);
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
    sum = simd_sum(sum);
    if (lane == 0) {
      norms[first + r] = O(metal::precise::sqrt(sum));
    }
  }
}

// scores[head, slot] = sqrt(pi / 2) / m * norms[slot, head] * sum of +-query[head, j]; one slot and head per thread.
template <typename T, typename N, typename O>
METAL_FUNC void qjl_inner_product(
    const device T* query,
    const device uchar* packed,
    const device N* norms,
    device O* scores,
    int slots,
    int heads,
    int projections,
    uint slot,
    uint head) {
  if (slot >= uint(slots) || head >= uint(heads)) {
    return;
  }
  const size_t row = size_t(slot) * size_t(heads) + size_t(head);
  const device uchar* signs = packed + row * size_t(projections / 8);
  const device T* q = query + size_t(head) * size_t(projections);
  float sum = 0.0f;
  for (int j = 0; j < projections; j += 8) {
    const uint byte = signs[j / 8];
    for (int t = 0; t < 8; ++t) {
      const float value = float(q[j + t]);
      sum += (byte >> t & 1) != 0 ? value : -value;
    }
  }
  scores[size_t(head) * size_t(slots) + size_t(slot)] = O(1.2533141373155003f / float(projections) * sum * float(norms[row]));
}

}  // namespace kvtool
