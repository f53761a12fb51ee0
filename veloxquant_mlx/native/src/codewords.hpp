// Rows of codes that stand for codewords, and rows of signs of random projections, to rows of floats.
#pragma once
#include "lookup.hpp"
#include "problem.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// One head's codes of a row, wherever memory ends: two bytes may be read from each place.
struct CodesOfRow {
  const Codewords& words;
  const uint8_t* codes;
  int first, bytes;
  uint8_t copy[MAX_DIM + 1];

  CodesOfRow(const Codewords& words, int head)
      : words(words), codes(words.codes + head * words.head), first(words.span[2 * head]), bytes(words.span[2 * head + 1]) {}

  // Bytes of a token: those of place p begin at p / 8.
  const uint8_t* of(int token) {
    const uint8_t* own = codes + token * words.row + first;
    if (words.end - own > bytes) return own - first;
    memcpy(copy, own, bytes), copy[bytes] = 0;
    return copy - first;
  }
};

inline int code_at(const uint8_t* codes, int place, int bits) {
  uint16_t both;
  memcpy(&both, codes + place / 8, 2);
  return both >> (place % 8) & ((1 << bits) - 1);
}

template <int SIZE>
inline void copy_word(float* to, const float* from) {
  memcpy(to, from, SIZE * sizeof(float));
}

// Runs of SIZE entries, each code a byte.
template <int SIZE>
void runs_of_bytes(const Codewords& words, const uint8_t* codes, const int64_t* table, float* out) {
  for (int i = 0; i < words.count; i++) copy_word<SIZE>(out + SIZE * i, words.values + table[i] + SIZE * codes[i]);
}

// The entries of a row in the order of its codes.
void decode_row(const Codewords& words, int head, const uint8_t* codes, float* out) {
  const int64_t own = int64_t(head) * words.count;
  const int32_t* place = words.place + own;
  const uint8_t* bits = words.bits + own;
  const int64_t* table = words.table + own;
  if (words.bytes && words.form == Form::RUNS) {
    codes += place[0] / 8;
    if (words.size == 4) return runs_of_bytes<4>(words, codes, table, out);
    if (words.size == 8) return runs_of_bytes<8>(words, codes, table, out);
  }
  for (int i = 0; i < words.count; i++) {
    const float* word = words.values + table[i] + int64_t(words.size) * code_at(codes, place[i], bits[i]);
    if (words.form == Form::PLANES)
      out[i] = word[0], out[words.count + i] = word[1];
    else
      memcpy(out + words.size * i, word, words.size * sizeof(float));
  }
}

void decode_codewords(const Rows& rows, int head, int from, int count, float* out) {
  const Codewords& words = rows.words;
  const int dim = rows.dim, width = padded(dim);
  alignas(64) float entries[MAX_DIM];
  CodesOfRow codes(words, head);
  for (int t = 0; t < count; t++, out += width) {
    const uint8_t* own = codes.of(from + t);
    for (int i = dim; i < width; i++) out[i] = 0;
    if (words.exact && (own[0] & 1)) {
      memcpy(out, words.exact + int64_t(head) * dim, dim * sizeof(float));
      continue;
    }
    decode_row(words, head, own, words.order ? entries : out);
    if (words.order)
      for (int i = 0; i < dim; i++) out[words.order[i]] = entries[i];
  }
}

// Components of a tile of tokens, one after another: y[i][TILE]; those behind `count` are zero.
void decode_parts(const Rows& rows, int head, int from, int count, float* y) {
  const Codewords& words = rows.words;
  const int64_t own = int64_t(head) * words.count;
  CodesOfRow codes(words, head);
  if (count < TILE) memset(y, 0, sizeof(float) * words.count * TILE);
  for (int t = 0; t < count; t++) {
    const uint8_t* at = codes.of(from + t);
    for (int i = 0; i < words.count; i++)
      y[i * TILE + t] = words.values[words.table[own + i] + code_at(at, words.place[own + i], words.bits[own + i])];
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
