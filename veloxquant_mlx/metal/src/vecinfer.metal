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

// Row of smooth factors for a row of keys (B, H, S, D). dims: rows, codewords, S, H, rows of smooth.
METAL_FUNC int vecinfer_head(const device int* dims, size_t row) {
  return dims[4] == 1 ? 0 : int(row / size_t(dims[2]) % size_t(dims[3]));
}

// One threadgroup per ROWS rows of keys: divide by smooth, rotate, quantize, decode, rotate back, multiply by smooth.
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
    uint lane,
    uint lanes) {
  constexpr int PARTS = D / SUB_DIM;
  const size_t first = size_t(group) * ROWS;
  const size_t left = size_t(dims[0]) - first;
  const int live = left < ROWS ? int(left) : ROWS;
  float turned[ROWS];
  for (int i = int(lane); i < ROWS * D; i += int(lanes)) {
    const int r = i / D;
    const int channel = i % D;
    const int head = vecinfer_head(dims, first + r);
    a[i] = r < live ? float(keys[(first + r) * D + channel]) / smooth[head * D + channel] : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int channel = int(lane); channel < D; channel += int(lanes)) {
    vecinfer_multiply<D, ROWS>(a, rotation, turned, channel);
    for (int r = 0; r < ROWS; ++r) {
      b[r * D + channel] = turned[r];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int part = int(lane); part < live * PARTS; part += int(lanes)) {
    const uint index = nearest_codeword<SUB_DIM>(b + part * SUB_DIM, codebook, dims[1]);
    indices[first * PARTS + part] = int(index);
    for (int j = 0; j < SUB_DIM; ++j) {
      a[part * SUB_DIM + j] = float(codebook[index * SUB_DIM + j]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int channel = int(lane); channel < D; channel += int(lanes)) {
    vecinfer_multiply<D, ROWS>(a, inverse, turned, channel);
    for (int r = 0; r < live; ++r) {
      const float factor = smooth[vecinfer_head(dims, first + r) * D + channel];
      values[(first + r) * D + channel] = half(turned[r] * factor);
    }
  }
}
