// Codes of BITS bits. lsb8: one little-endian bit stream, codes may straddle bytes. lsb32: 32 / BITS codes a word, none straddles.
namespace kvtool {

template <int BITS>
inline uint unpack(const device uchar* stream, uint i) {
  const uint byte = i / 8 * BITS + i % 8 * BITS / 8, shift = i % 8 * BITS % 8;
  uint window = stream[byte];
  if (8 % BITS != 0 && shift + BITS > 8) window |= uint(stream[byte + 1]) << 8;
  return (window >> shift) & ((1u << BITS) - 1);
}

template <int BITS>
inline uint unpack(const device uint* words, uint i) {
  const uint per = 32 / BITS;
  return (words[i / per] >> (i % per * BITS)) & ((1u << BITS) - 1);
}

// Byte j of the stream of n codes.
template <int BITS>
inline void pack(const device uchar* codes, uint n, uint j, device uchar* stream) {
  const uint block = j / BITS * 8, start = j % BITS * 8;  // 8 codes take BITS bytes; bit `start` of them is the byte's first
  uint byte = 0;
  for (uint k = start / BITS; k * BITS < start + 8; k++) {
    if (block + k >= n) break;
    const uint code = codes[block + k] & ((1u << BITS) - 1), bit = k * BITS;
    byte |= bit >= start ? code << (bit - start) : code >> (start - bit);
  }
  stream[j] = uchar(byte);
}

// Word j of n codes.
template <int BITS>
inline void pack(const device uchar* codes, uint n, uint j, device uint* words) {
  const uint per = 32 / BITS;
  uint word = 0;
  for (uint k = 0; k < per && j * per + k < n; k++) word |= (codes[j * per + k] & ((1u << BITS) - 1)) << (k * BITS);
  words[j] = word;
}

// One bit a lane, WIDTH lanes a row: the row's bits, bit t of byte b from lane 8 b + t. All 32 lanes take part; `keep` says whether to store.
template <int WIDTH>
inline void pack_lanes(bool bit, device uchar* row, ushort lane, bool keep) {
  const uint mask = uint(simd_vote::vote_t(simd_ballot(bit)));
  const uint within = lane % WIDTH;
  if (keep && within < WIDTH / 8) row[within] = uchar(mask >> (lane - within + 8 * within));
}

}  // namespace kvtool
