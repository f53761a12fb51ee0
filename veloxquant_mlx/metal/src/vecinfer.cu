// Vector quantization of keys and values; needs nearest.

// One thread per sub-vector of `x`: its nearest codeword's index and, with DECODE, the codeword itself as half.
template <int SUB_DIM, bool DECODE, typename X, typename C>
__device__ inline void vecinfer_encode(const X* x, const C* codebook, const int* dims, int* indices, __half* values, unsigned row) {
  if (row >= unsigned(dims[0])) {
    return;
  }
  const size_t first = size_t(row) * SUB_DIM;
  const unsigned index = nearest_codeword<SUB_DIM>(x + first, codebook, dims[1]);
  indices[row] = int(index);
  if (DECODE) {
    for (int j = 0; j < SUB_DIM; ++j) {
      values[first + j] = __float2half_rn(float(codebook[index * SUB_DIM + j]));
    }
  }
}

// One thread per value: the codeword of its sub-vector; an index out of range reads the last codeword.
template <typename I, typename C, typename O>
__device__ inline void vecinfer_gather(const I* indices, const C* codebook, const int* dims, O* out, unsigned i) {
  const unsigned sub_dim = unsigned(dims[2]);
  if (i >= unsigned(dims[0])) {
    return;
  }
  const unsigned index = min(unsigned(indices[i / sub_dim]), unsigned(dims[1]) - 1u);
  out[i] = O(float(codebook[index * sub_dim + i % sub_dim]));
}

// out[r] = rows[r] @ matrix for ROWS rows in shared memory; thread `column` owns one column.
template <int D, int ROWS>
__device__ inline void vecinfer_multiply(const float* rows, const float* matrix, float* out, int column) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    out[r] = 0.0f;
  }
  for (int j = 0; j < D; ++j) {
    const float entry = matrix[j * D + column];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      out[r] += rows[r * D + j] * entry;
    }
  }
}

// Row of smooth factors for a row of keys (B, H, S, D). dims: rows, codewords, S, H, rows of smooth.
__device__ inline int vecinfer_head(const int* dims, size_t row) {
  return dims[4] == 1 ? 0 : int(row / size_t(dims[2]) % size_t(dims[3]));
}

// One block per ROWS rows of keys: divide by smooth, rotate, quantize, decode, rotate back, multiply by smooth.
template <int D, int SUB_DIM, int ROWS, typename X, typename C>
__device__ inline void vecinfer_encode_decode(
    const X* keys,
    const C* codebook,
    const float* rotation,
    const float* inverse,
    const float* smooth,
    const int* dims,
    __half* values,
    int* indices,
    float* a,
    float* b,
    unsigned group,
    unsigned lane,
    unsigned lanes) {
  constexpr int PARTS = D / SUB_DIM;
  const size_t first = size_t(group) * ROWS;
  const size_t left = size_t(dims[0]) - first;
  const int live = left < ROWS ? int(left) : ROWS;
  float turned[ROWS];
  for (int i = int(lane); i < ROWS * D; i += int(lanes)) {
    const int r = i / D;
    const int channel = i % D;
    const int head = vecinfer_head(dims, first + r);
    a[i] = r < live ? __fdiv_rn(float(keys[(first + r) * D + channel]), smooth[head * D + channel]) : 0.0f;
  }
  __syncthreads();
  for (int channel = int(lane); channel < D; channel += int(lanes)) {
    vecinfer_multiply<D, ROWS>(a, rotation, turned, channel);
    for (int r = 0; r < ROWS; ++r) {
      b[r * D + channel] = turned[r];
    }
  }
  __syncthreads();
  for (int part = int(lane); part < live * PARTS; part += int(lanes)) {
    const unsigned index = nearest_codeword<SUB_DIM>(b + part * SUB_DIM, codebook, dims[1]);
    indices[first * PARTS + part] = int(index);
    for (int j = 0; j < SUB_DIM; ++j) {
      a[part * SUB_DIM + j] = float(codebook[index * SUB_DIM + j]);
    }
  }
  __syncthreads();
  for (int channel = int(lane); channel < D; channel += int(lanes)) {
    vecinfer_multiply<D, ROWS>(a, inverse, turned, channel);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= live) {
        break;
      }
      const float factor = smooth[vecinfer_head(dims, first + r) * D + channel];
      values[(first + r) * D + channel] = __float2half_rn(turned[r] * factor);
    }
  }
}
