// Codes of BITS bits. lsb8: one little-endian bit stream, codes may straddle bytes. lsb32: 32 / BITS codes a word, none straddles.
namespace kvtool {

template <int BITS>
__device__ inline uint32_t unpack(const uint8_t* stream, uint32_t i) {
  const uint32_t byte = i / 8 * BITS + i % 8 * BITS / 8, shift = i % 8 * BITS % 8;
  uint32_t window = stream[byte];
  if (8 % BITS != 0 && shift + BITS > 8) window |= uint32_t(stream[byte + 1]) << 8;
  return (window >> shift) & ((1u << BITS) - 1);
}

template <int BITS>
__device__ inline uint32_t unpack(const uint32_t* words, uint32_t i) {
  constexpr uint32_t per = 32 / BITS;
  return (words[i / per] >> (i % per * BITS)) & ((1u << BITS) - 1);
}

// Byte j of the stream of n codes.
template <int BITS>
__device__ inline void pack(const uint8_t* codes, uint32_t n, uint32_t j, uint8_t* stream) {
  const uint32_t block = j / BITS * 8, start = j % BITS * 8;  // 8 codes take BITS bytes; bit `start` of them is the byte's first
  uint32_t byte = 0;
  for (uint32_t k = start / BITS; k * BITS < start + 8; k++) {
    if (block + k >= n) break;
    const uint32_t code = codes[block + k] & ((1u << BITS) - 1), bit = k * BITS;
    byte |= bit >= start ? code << (bit - start) : code >> (start - bit);
  }
  stream[j] = uint8_t(byte);
}

// Word j of n codes.
template <int BITS>
__device__ inline void pack(const uint8_t* codes, uint32_t n, uint32_t j, uint32_t* words) {
  constexpr uint32_t per = 32 / BITS;
  uint32_t word = 0;
  for (uint32_t k = 0; k < per && j * per + k < n; k++) word |= (codes[j * per + k] & ((1u << BITS) - 1)) << (k * BITS);
  words[j] = word;
}

// One bit a lane, WIDTH lanes a row: the row's bits, bit t of byte b from lane 8 b + t. All 32 lanes take part; `keep` says whether to store.
template <int WIDTH>
__device__ inline void pack_lanes(bool bit, uint8_t* row, uint32_t lane, bool keep) {
  const uint32_t mask = __ballot_sync(0xffffffffu, bit);
  const uint32_t within = lane % WIDTH;
  if (keep && within < WIDTH / 8) row[within] = uint8_t(mask >> (lane - within + 8 * within));
}

}  // namespace kvtool
