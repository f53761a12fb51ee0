// Vector quantization of keys and values; needs nearest.

// One thread per sub-vector of `x`: its nearest codeword's index and, with DECODE, the codeword itself as half.
template <int SUB_DIM, bool DECODE, typename X, typename C>
METAL_FUNC void vecinfer_encode(
    const device X* x, const device C* codebook, const device int* dims, device int* indices, device half* values, uint row) {
  if (row >= uint(dims[0])) {
    return;
  }
  const size_t first = size_t(row) * SUB_DIM;
  const uint index = nearest_codeword<SUB_DIM>(x + first, codebook, dims[1]);
  indices[row] = int(index);
  if (DECODE) {
    for (int j = 0; j < SUB_DIM; ++j) {
      values[first + j] = half(float(codebook[index * SUB_DIM + j]));
    }
  }
}

// One thread per value: the codeword of its sub-vector; an index out of range reads the last codeword.
template <typename I, typename C, typename O>
METAL_FUNC void vecinfer_gather(const device I* indices, const device C* codebook, const device int* dims, device O* out, uint i) {
  const uint sub_dim = uint(dims[2]);
  if (i >= uint(dims[0])) {
    return;
  }
  const uint index = metal::min(uint(indices[i / sub_dim]), uint(dims[1]) - 1u);
  out[i] = O(float(codebook[index * sub_dim + i % sub_dim]));
}

// out[r] = rows[r] @ matrix for ROWS rows in threadgroup memory; thread `column` owns one column.
template <int D, int ROWS>
METAL_FUNC void vecinfer_multiply(const threadgroup float* rows, const device float* matrix, thread float* out, int column) {
  for (int r = 0; r < ROWS; ++r) {
    out[r] = 0.0f;
  }
  for (int j = 0; j < D; ++j) {
    const float entry = matrix[j * D + column];
    for (int r = 0; r < ROWS; ++r) {
      out[r] += rows[r * D + j] * entry;
    }
  }
}

// One threadgroup per ROWS rows of keys (B, H, S, D), a thread per channel: divide by smooth, rotate, quantize, decode, rotate back,
// multiply by smooth. dims: rows, codewords, S, H, rows of smooth. Needs ROWS <= SUB_DIM, so that a thread has at most one sub-vector.
template <int D, int SUB_DIM, int ROWS, typename X, typename C>
METAL_FUNC void vecinfer_encode_decode(
    const device X* keys,
    const device C* codebook,
    const device float* rotation,
    const device float* inverse,
    const device float* smooth,
    const device int* dims,
    device half* values,
    device int* indices,
    threadgroup float* a,
    threadgroup float* b,
    uint group,
    uint lane) {
  constexpr int PARTS = D / SUB_DIM;
  const int channel = int(lane);
  const size_t first = size_t(group) * ROWS;
  const int live = int(metal::min(size_t(ROWS), size_t(dims[0]) - first));
  float factor[ROWS];
  float turned[ROWS];
  if (channel < D) {
    for (int r = 0; r < ROWS; ++r) {
      const int head = dims[4] == 1 ? 0 : int((first + r) / size_t(dims[2]) % size_t(dims[3]));
      factor[r] = smooth[head * D + channel];
      a[r * D + channel] = r < live ? float(keys[(first + r) * D + channel]) / factor[r] : 0.0f;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (channel < D) {
    vecinfer_multiply<D, ROWS>(a, rotation, turned, channel);
    for (int r = 0; r < ROWS; ++r) {
      b[r * D + channel] = turned[r];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (channel < live * PARTS) {
    const uint index = nearest_codeword<SUB_DIM>(b + channel * SUB_DIM, codebook, dims[1]);
    indices[first * PARTS + channel] = int(index);
    for (int j = 0; j < SUB_DIM; ++j) {
      a[channel * SUB_DIM + j] = float(codebook[index * SUB_DIM + j]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (channel < D) {
    vecinfer_multiply<D, ROWS>(a, inverse, turned, channel);
    for (int r = 0; r < live; ++r) {
      values[(first + r) * D + channel] = half(turned[r] * factor[r]);
    }
  }
}
