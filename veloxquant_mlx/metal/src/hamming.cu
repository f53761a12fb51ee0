// Hamming distances between packed sign bits.
namespace kvtool {

// Number of bits that differ between two runs of bytes; whole words where both may be read so.
__device__ inline unsigned hamming_distance(const uint8_t* a, const uint8_t* b, int bytes) {
  unsigned count = 0;
  int i = 0;
  if (((size_t(a) | size_t(b)) & 3) == 0) {
    for (; i + 4 <= bytes; i += 4) {
      count += __popc(*reinterpret_cast<const unsigned*>(a + i) ^ *reinterpret_cast<const unsigned*>(b + i));
    }
  }
  for (; i < bytes; ++i) {
    count += __popc(unsigned(a[i] ^ b[i]));
  }
  return count;
}

// scores[row] = distance * scale + offsets[row]; one row per thread.
__device__ inline void hamming_score(
    const uint8_t* query,
    const uint8_t* bits,
    const float* offsets,
    const float* scale,
    float* scores,
    int rows,
    int bytes,
    unsigned row) {
  if (row >= unsigned(rows)) {
    return;
  }
  const unsigned distance = hamming_distance(query, bits + size_t(row) * size_t(bytes), bytes);
  // One rounding per operation, as in the MLX definition: these are never contracted.
  scores[row] = __fadd_rn(__fmul_rn(float(distance), scale[0]), offsets[row]);
}

}  // namespace kvtool
