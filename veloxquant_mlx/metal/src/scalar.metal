// Scalar codes, one value at a time. Needs nearest and rotate. A group of 256 threads owns 1024 consecutive values: lane t has t, t + 256, ...
namespace kvtool {

template <int COUNT, typename T>
METAL_FUNC void scalar_quantize(
    const device T* x, const device float* centroids, device uchar* codes, uint size, uint group, uint lane) {
  float table[COUNT];
  for (int i = 0; i < COUNT; ++i) {
    table[i] = centroids[i];
  }
  for (uint k = 0; k < 1024; k += 256) {
    const uint i = group * 1024 + k + lane;
    if (i < size) {
      codes[i] = uchar(nearest_centroid(float(x[i]), table, COUNT));
    }
  }
}

template <typename O>
METAL_FUNC void scalar_dequantize(
    const device uchar* codes, const device float* centroids, device O* values, uint size, uint count, uint group, uint lane) {
  for (uint k = 0; k < 1024; k += 256) {
    const uint i = group * 1024 + k + lane;
    if (i < size) {
      values[i] = O(centroids[metal::min(uint(codes[i]), count - 1)]);
    }
  }
}

// Two-stage codes of one 32-bit word: code i of a row at bits (i % PER) * BITS of word i / PER, spare bits 0. R rounds the residual.
template <int BITS, typename R, typename T>
METAL_FUNC void rvq_pack_word(
    const device T* rotated,
    const device float* centroids1,
    const device float* boundaries1,
    const device float* boundaries2,
    device uint* packed1,
    device uint* packed2,
    int rows,
    int dim,
    uint index) {
  constexpr int COUNT = 1 << BITS;
  constexpr int PER = 32 / BITS;
  const uint words = uint(dim + PER - 1) / PER;
  if (index >= uint(rows) * words) {
    return;
  }
  const int first = int(index % words) * PER;
  const device T* row = rotated + size_t(index / words) * size_t(dim);
  uint word1 = 0, word2 = 0;
  for (int k = 0; k < PER && first + k < dim; ++k) {
    const float y = float(row[first + k]);
    const uint code1 = cell_of(y, boundaries1, COUNT - 1);
    const float residual = float(R(y - centroids1[code1]));
    const uint code2 = cell_of(residual, boundaries2, COUNT - 1);
    word1 |= code1 << (k * BITS);
    word2 |= code2 << (k * BITS);
  }
  packed1[index] = word1;
  packed2[index] = word2;
}

// codes of H (signs * x) * scale; one SIMD-group per row.
template <int DIM, int COUNT, typename T>
METAL_FUNC void scalar_hadamard_quantize(
    const device T* x,
    const device float* signs,
    const device float* centroids,
    const device float* scale,
    device uchar* codes,
    uint rows,
    uint row,
    uint lane) {
  if (row >= rows) {  // the whole SIMD-group
    return;
  }
  constexpr int PER = (DIM + 31) / 32;
  const size_t first = size_t(row) * DIM;
  float v[PER];
  for (int j = 0; j < PER; ++j) {
    const uint i = 32 * j + lane;
    v[j] = i < DIM ? float(x[first + i]) * signs[i] : 0.0f;
  }
  hadamard<DIM>(v, ushort(lane));
  float table[COUNT];
  for (int i = 0; i < COUNT; ++i) {
    table[i] = centroids[i];
  }
  for (int j = 0; j < PER; ++j) {
    const uint i = 32 * j + lane;
    if (i < DIM) {
      codes[first + i] = uchar(nearest_centroid(v[j] * scale[0], table, COUNT));
    }
  }
}

}  // namespace kvtool
