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

// Cells among 2^BITS - 1 ascending boundaries, as `cell_of` counts them. Up to 3 bits they stand in registers; 4 bits halve the cells four
// times, the last two times among boundaries in shared memory.
template <int BITS>
struct RvqCells {
  static constexpr int COUNT = (1 << BITS) - 1;
  float own[COUNT < 8 ? COUNT : 3];
  const float* all;

  __device__ inline explicit RvqCells(const float* shared) : all(shared) {
#pragma unroll
    for (int i = 0; i < (COUNT < 8 ? COUNT : 3); i++) {
      own[i] = shared[COUNT < 8 ? i : 4 * i + 3];
    }
  }

  __device__ inline unsigned operator()(float x) const {
    if (COUNT < 8) {
      unsigned cell = 0;
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        cell += x > own[i] ? 1u : 0u;
      }
      return cell;
    }
    unsigned cell = x > own[1] ? 8u : 0u;
    cell += x > (cell ? own[2] : own[0]) ? 4u : 0u;
    cell += x > all[cell + 1] ? 2u : 0u;
    return cell + (x > all[cell] ? 1u : 0u);
  }
};

// Two-stage codes, WORDS 32-bit words a thread, a block's threads apart: code i of a row stands at bits (i % PER) * BITS of word i / PER,
// spare bits 0. R rounds the residual. table: 3 * 16 floats of shared memory.
template <int BITS, int WORDS, typename R, typename T>
__device__ inline void rvq_pack_words(
    const T* rotated,
    const float* centroids1,
    const float* boundaries1,
    const float* boundaries2,
    uint32_t* packed1,
    uint32_t* packed2,
    int rows,
    int dim,
    float* table) {
  constexpr int COUNT = 1 << BITS;
  constexpr int PER = 32 / BITS;
  if (threadIdx.x < COUNT) {
    table[threadIdx.x] = centroids1[threadIdx.x];
    if (threadIdx.x < COUNT - 1) {
      table[16 + threadIdx.x] = boundaries1[threadIdx.x];
      table[32 + threadIdx.x] = boundaries2[threadIdx.x];
    }
  }
  const unsigned words = unsigned(dim + PER - 1) / PER, count = unsigned(rows) * words;
  const unsigned first = blockIdx.x * (blockDim.x * WORDS) + threadIdx.x;
  const bool aligned = starts_at_16(rotated);
  Run<PER, T> run[WORDS];
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const unsigned index = first + w * blockDim.x;
    const int at = int(index % words) * PER;
    if (index < count) {
      const T* from = rotated + size_t(index / words) * size_t(dim) + at;
      if (at + PER <= dim) {
        run[w].load(from, aligned);
      } else {
        run[w].load_first(from, dim - at);
      }
    }
  }
  __syncthreads();
  const RvqCells<BITS> cells1(table + 16), cells2(table + 32);
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const unsigned index = first + w * blockDim.x;
    if (index >= count) {
      return;
    }
    uint32_t word1 = 0, word2 = 0;
    const int own = dim - int(index % words) * PER;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      if (k < own) {
        const float y = run[w][k];
        const unsigned code1 = cells1(y);
        word1 |= code1 << (k * BITS);
        word2 |= cells2(float(R(y - table[code1]))) << (k * BITS);
      }
    }
    packed1[index] = word1;
    packed2[index] = word2;
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
