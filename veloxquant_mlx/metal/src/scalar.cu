// Scalar codes, one value at a time. Needs nearest and rotate. A block of 256 threads owns 1024 consecutive values: lane t has t, t + 256, ...
namespace kvtool {

template <int COUNT, typename T>
__device__ inline void scalar_quantize(const T* x, const float* centroids, uint8_t* codes, unsigned size, unsigned group, unsigned lane) {
  float table[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    table[i] = centroids[i];
  }
  for (unsigned k = 0; k < 1024; k += 256) {
    const unsigned i = group * 1024 + k + lane;
    if (i < size) {
      codes[i] = uint8_t(nearest_centroid(float(x[i]), table, COUNT));
    }
  }
}

template <typename O>
__device__ inline void scalar_dequantize(
    const uint8_t* codes, const float* centroids, O* values, unsigned size, unsigned count, unsigned group, unsigned lane) {
  for (unsigned k = 0; k < 1024; k += 256) {
    const unsigned i = group * 1024 + k + lane;
    if (i < size) {
      values[i] = O(centroids[min(unsigned(codes[i]), count - 1)]);
    }
  }
}

// Two-stage codes of one 32-bit word: code i of a row at bits (i % PER) * BITS of word i / PER, spare bits 0. R rounds the residual.
template <int BITS, typename R, typename T>
__device__ inline void rvq_pack_word(
    const T* rotated,
    const float* centroids1,
    const float* boundaries1,
    const float* boundaries2,
    uint32_t* packed1,
    uint32_t* packed2,
    int rows,
    int dim,
    unsigned index) {
  constexpr int COUNT = 1 << BITS;
  constexpr int PER = 32 / BITS;
  const unsigned words = unsigned(dim + PER - 1) / PER;
  if (index >= unsigned(rows) * words) {
    return;
  }
  const int first = int(index % words) * PER;
  const T* row = rotated + size_t(index / words) * size_t(dim);
  uint32_t word1 = 0, word2 = 0;
  for (int k = 0; k < PER && first + k < dim; ++k) {
    const float y = float(row[first + k]);
    const unsigned code1 = cell_of(y, boundaries1, COUNT - 1);
    const float residual = float(R(y - centroids1[code1]));
    const unsigned code2 = cell_of(residual, boundaries2, COUNT - 1);
    word1 |= code1 << (k * BITS);
    word2 |= code2 << (k * BITS);
  }
  packed1[index] = word1;
  packed2[index] = word2;
}

// codes of H (signs * x) * scale; one warp per row.
template <int DIM, int COUNT, typename T>
__device__ inline void scalar_hadamard_quantize(
    const T* x,
    const float* signs,
    const float* centroids,
    const float* scale,
    uint8_t* codes,
    unsigned rows,
    unsigned row,
    unsigned lane) {
  if (row >= rows) {  // the whole warp
    return;
  }
  constexpr int PER = (DIM + 31) / 32;
  const size_t first = size_t(row) * DIM;
  float v[PER];
#pragma unroll
  for (int j = 0; j < PER; ++j) {
    const unsigned i = 32 * j + lane;
    // One rounding per operation, as in the MLX definition: these are never contracted.
    v[j] = i < DIM ? __fmul_rn(float(x[first + i]), signs[i]) : 0.0f;
  }
  hadamard<DIM>(v, lane);
  float table[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    table[i] = centroids[i];
  }
#pragma unroll
  for (int j = 0; j < PER; ++j) {
    const unsigned i = 32 * j + lane;
    if (i < DIM) {
      codes[first + i] = uint8_t(nearest_centroid(__fmul_rn(v[j], scale[0]), table, COUNT));
    }
  }
}

}  // namespace kvtool
