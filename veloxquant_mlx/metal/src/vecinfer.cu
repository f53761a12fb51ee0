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

// One block per ROWS rows of keys (B, H, S, D), a thread per channel: divide by smooth, rotate, quantize, decode, rotate back,
// multiply by smooth. dims: rows, codewords, S, H, rows of smooth. Needs ROWS <= SUB_DIM, so that a thread has at most one sub-vector.
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
    unsigned lane) {
  constexpr int PARTS = D / SUB_DIM;
  const int channel = int(lane);
  const size_t first = size_t(group) * ROWS;
  const size_t left = size_t(dims[0]) - first;
  const int live = left < ROWS ? int(left) : ROWS;
  float factor[ROWS];
  float turned[ROWS];
  if (channel < D) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int head = dims[4] == 1 ? 0 : int((first + r) / size_t(dims[2]) % size_t(dims[3]));
      factor[r] = smooth[head * D + channel];
      a[r * D + channel] = r < live ? __fdiv_rn(float(keys[(first + r) * D + channel]), factor[r]) : 0.0f;
    }
  }
  __syncthreads();
  if (channel < D) {
    vecinfer_multiply<D, ROWS>(a, rotation, turned, channel);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      b[r * D + channel] = turned[r];
    }
  }
  __syncthreads();
  if (channel < live * PARTS) {
    const unsigned index = nearest_codeword<SUB_DIM>(b + channel * SUB_DIM, codebook, dims[1]);
    indices[first * PARTS + channel] = int(index);
    for (int j = 0; j < SUB_DIM; ++j) {
      a[channel * SUB_DIM + j] = float(codebook[index * SUB_DIM + j]);
    }
  }
  __syncthreads();
  if (channel < D) {
    vecinfer_multiply<D, ROWS>(a, inverse, turned, channel);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r < live) {
        values[(first + r) * D + channel] = __float2half_rn(turned[r] * factor[r]);
      }
    }
  }
}
