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

// Four times the cell among 2^BITS - 1 ascending boundaries, as `cell_of` counts it: the place of the cell's centroid, in bytes. The cells are
// halved BITS times; up to 3 bits among boundaries in registers, the last two times of 4 among those in shared memory.
template <int BITS>
struct ScalarCells {
  static constexpr int COUNT = (1 << BITS) - 1;
  float own[COUNT < 8 ? COUNT : 3];
  const float* all;

  __device__ inline explicit ScalarCells(const float* shared) : all(shared) {
#pragma unroll
    for (int i = 0; i < (COUNT < 8 ? COUNT : 3); i++) {
      own[i] = shared[COUNT < 8 ? i : 4 * i + 3];
    }
  }

  __device__ inline float boundary(unsigned at) const {
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(all) + at);
  }

  __device__ inline unsigned operator()(float x) const {
    const bool upper = x > own[BITS == 1 ? 0 : BITS == 3 ? 3 : 1];
    if (BITS == 1) {
      return upper ? 4u : 0u;
    }
    const bool next = x > (upper ? own[BITS == 3 ? 5 : 2] : own[BITS == 3 ? 1 : 0]);
    unsigned at = (upper ? 2u << BITS : 0u) + (next ? 1u << BITS : 0u);
    if (BITS == 3) {
      at += x > (upper ? (next ? own[6 % COUNT] : own[4 % COUNT]) : (next ? own[2 % COUNT] : own[0])) ? 4u : 0u;
    } else if (BITS == 4) {
      at += x > boundary(at + 4) ? 8u : 0u;
      at += x > boundary(at) ? 4u : 0u;
    }
    return at;
  }
};

// A code from four times itself to its bits in a word.
__device__ inline uint32_t scalar_place(unsigned at, int bit) {
  return bit < 2 ? at >> (2 - bit) : at << (bit - 2);
}

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
      if (sizeof(T) == 2 && Run<PER, T>::WORD == 4 && aligned && dim % 2 == 0) {
        run[w].load_pairs(from, dim - at);
      } else if (at + PER <= dim) {
        run[w].load(from, aligned);
      } else {
        run[w].load_first(from, dim - at);
      }
    }
  }
  __syncthreads();
  const ScalarCells<BITS> cells1(table + 16), cells2(table + 32);
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    const unsigned index = first + w * blockDim.x;
    if (index >= count) {
      return;
    }
    uint32_t word1 = 0, word2 = 0;
#pragma unroll
    for (int k = 0; k < PER; ++k) {
      const float y = run[w][k];
      const unsigned at1 = cells1(y);
      const float centroid = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + at1);
      word1 |= scalar_place(at1, k * BITS);
      word2 |= scalar_place(cells2(float(R(y - centroid))), k * BITS);
    }
    const int own = dim - int(index % words) * PER;
    const uint32_t real = own < PER ? (1u << (own * BITS)) - 1 : 0xffffffffu;
    packed1[index] = word1 & real;
    packed2[index] = word2 & real;
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

// Ascending integers for ascending floats, and back.
__device__ inline uint32_t scalar_order(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float scalar_ordered(uint32_t order) {
  return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

// The largest float that is no nearer to the upper of two neighbouring centroids, distances rounded as `nearest_centroid` rounds them:
// between the two both are monotonic.
__device__ inline float scalar_threshold(float lower, float upper) {
  uint32_t from = scalar_order(lower), to = scalar_order(upper);
  while (to - from > 1) {
    const uint32_t middle = from + (to - from) / 2;
    const float x = scalar_ordered(middle);
    if (fabsf(x - upper) < fabsf(x - lower)) {
      to = middle;
    } else {
      from = middle;
    }
  }
  return scalar_ordered(from);
}

// Up to which size of x the thresholds give `nearest_centroid`: beyond, distances to different centroids may round to the same. Negative
// where the centroids do not ascend.
__device__ inline float scalar_limit(const float* centroids, int count) {
  float gap = 1e30f;
  for (int i = 1; i < count; ++i) {
    const float step = centroids[i] - centroids[i - 1];
    if (!(step > 0.0f)) {
      return -1.0f;
    }
    gap = fminf(gap, step);
  }
  const float limit = fminf(gap * 1048576.0f, 1e30f);
  return fabsf(centroids[0]) <= limit && fabsf(centroids[count - 1]) <= limit ? limit : -1.0f;
}

// The codes of `scalar_hadamard_quantize`, DIM at least 8: a lane holds 8 consecutive elements, a warp 1024, in turns.
// table: 33 floats of shared memory.
template <int DIM, int BITS, typename T>
__device__ inline void scalar_hadamard_octets(
    const T* x, const float* signs, const float* centroids, const float* scale, uint8_t* codes, int rows, int count, float* table) {
  constexpr int C = DIM > 256 ? DIM / 256 : 1, W = DIM < 256 ? DIM / 8 : 32, ROWS = 32 / W, TURNS = 4 / C;
  const int thread = int(threadIdx.x);
  if (thread < count) {
    table[16 + thread] = centroids[thread];
    if (thread < count - 1) {
      table[thread] = scalar_threshold(centroids[thread], centroids[thread + 1]);
    }
  } else if (thread == 32) {
    table[32] = scalar_limit(centroids, count);
  }
  const uint32_t lane = threadIdx.x % 32, octet = lane % W;
  float sign[C][8];
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      sign[c][e] = signs[256 * c + 8 * octet + e];
    }
  }
  const float factor = scale[0];
  const bool aligned = starts_at_16(x);
  __syncthreads();
  const ScalarCells<BITS> cells(table);
  const float limit = table[32];
  const int last = rows - 1, warps = int(gridDim.x * blockDim.x / 32);
  const int turns = (rows + ROWS * TURNS - 1) / (ROWS * TURNS);
  for (int turn = int(blockIdx.x * blockDim.x + threadIdx.x) / 32; turn < turns; turn += warps) {
    const int first = turn * (ROWS * TURNS) + int(lane / W);
    Run<8, T> run[TURNS][C];
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        run[t][c].load(x + size_t(min(first + t * ROWS, last)) * DIM + 256 * c + 8 * octet, aligned);
      }
    }
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
      float v[C][8];
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          v[c][e] = __fmul_rn(run[t][c][e], sign[c][e]);
        }
      }
      hadamard_octets<DIM>(v, lane);
#pragma unroll
      for (int c = 0; c < C; ++c) {
        uint32_t word[2] = {0, 0};
        float most = 0.0f, y[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          y[e] = __fmul_rn(v[c][e], factor);
          most = fmaxf(most, fabsf(y[e]));  // passes over NaN, whose code is 0 either way
          word[e / 4] |= scalar_place(cells(y[e]), e % 4 * 8);
        }
        if (most > limit) {
          word[0] = word[1] = 0;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            word[e / 4] |= nearest_centroid(y[e], table + 16, count) << (e % 4 * 8);
          }
        }
        const int row = first + t * ROWS;
        if (row <= last) {
          *reinterpret_cast<uint2*>(codes + size_t(row) * DIM + 256 * c + 8 * octet) = make_uint2(word[0], word[1]);
        }
      }
    }
  }
}

}  // namespace kvtool
