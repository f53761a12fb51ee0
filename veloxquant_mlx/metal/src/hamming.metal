// Hamming distances between packed sign bits.
namespace kvtool {

METAL_FUNC uint hamming_load4(const device uchar* p) {  // rows may start at any byte
  return uint(p[0]) | uint(p[1]) << 8 | uint(p[2]) << 16 | uint(p[3]) << 24;
}

// Number of bits that differ between two runs of bytes.
METAL_FUNC uint hamming_distance(const device uchar* a, const device uchar* b, int bytes) {
  uint count = 0;
  int i = 0;
  for (; i + 4 <= bytes; i += 4) {
    count += metal::popcount(hamming_load4(a + i) ^ hamming_load4(b + i));
  }
  for (; i < bytes; ++i) {
    count += metal::popcount(uint(a[i] ^ b[i]));
  }
  return count;
}

// scores[row] = distance * scale + offsets[row]; one row per thread.
METAL_FUNC void hamming_score(
    const device uchar* query,
    const device uchar* bits,
    const device float* offsets,
    const device float* scale,
    device float* scores,
    int rows,
    int bytes,
    uint row) {
#pragma METAL fp contract(off)  // one rounding per operation, as in the MLX definition
  if (row >= uint(rows)) {
    return;
  }
  const float product = float(hamming_distance(query, bits + size_t(row) * size_t(bytes), bytes)) * scale[0];
  scores[row] = product + offsets[row];
}

}  // namespace kvtool
