// Scalar codes, one value at a time. Needs nearest. A block of 256 threads owns 1024 consecutive values: thread t has t, t + 256, ...

constexpr unsigned SCALAR_THREADS = 256;
constexpr unsigned SCALAR_TILE = 1024;

template <int COUNT, typename T>
__device__ inline void scalar_quantize(const T* x, const float* centroids, uint8_t* codes, unsigned size, unsigned group, unsigned lane) {
  float table[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    table[i] = centroids[i];
  }
  for (unsigned k = 0; k < SCALAR_TILE; k += SCALAR_THREADS) {
    const unsigned i = group * SCALAR_TILE + k + lane;
    if (i < size) {
      codes[i] = uint8_t(nearest_centroid(float(x[i]), table, COUNT));
    }
  }
}

template <typename O>
__device__ inline void scalar_dequantize(
    const uint8_t* codes, const float* centroids, O* values, unsigned size, unsigned count, unsigned group, unsigned lane) {
  for (unsigned k = 0; k < SCALAR_TILE; k += SCALAR_THREADS) {
    const unsigned i = group * SCALAR_TILE + k + lane;
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

// H v for one row of DIM values, a power of two: v[j] of a lane is element 32 j + lane; strides 1, 2, 4, ... in that order.
template <int DIM>
__device__ inline void scalar_hadamard(float* v, unsigned lane) {
  constexpr int PER = (DIM + 31) / 32;
  constexpr int LANES = DIM < 32 ? DIM : 32;
#pragma unroll
  for (int stride = 1; stride < LANES; stride *= 2) {
#pragma unroll
    for (int j = 0; j < PER; ++j) {
      const float other = __shfl_xor_sync(0xffffffffu, v[j], stride);
      v[j] = (lane & unsigned(stride)) != 0 ? other - v[j] : v[j] + other;
    }
  }
#pragma unroll
  for (int stride = 1; stride < PER; stride *= 2) {
#pragma unroll
    for (int j = 0; j < PER; ++j) {
      if ((j & stride) == 0) {
        const float low = v[j], high = v[j + stride];
        v[j] = low + high;
        v[j + stride] = low - high;
      }
    }
  }
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
  scalar_hadamard<DIM>(v, lane);
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

// packed[i] has codes 2 i and 2 i + 1 in its low and high nibble.
__device__ inline void scalar_pack_nibbles(const uint8_t* codes, uint8_t* packed, unsigned size, unsigned group, unsigned lane) {
  for (unsigned k = 0; k < SCALAR_TILE; k += SCALAR_THREADS) {
    const unsigned i = group * SCALAR_TILE + k + lane;
    if (i < size) {
      packed[i] = uint8_t((codes[2 * size_t(i)] & 15) | (codes[2 * size_t(i) + 1] & 15) << 4);
    }
  }
}
