// Rows of codes that stand for codewords, and rows of signs of random projections, to rows of floats.
#pragma once
#include "lookup.hpp"
#include "problem.hpp"
#include "simd.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// Real parts of a plane of so many bits, before the imaginary ones: each table is repeated to at least 16.
inline int plane_values(int bits) { return bits < 4 ? 16 : 1 << bits; }

constexpr int BEHIND = 8;  // bytes behind a row of codes that may be read

// One head's codes of a row, wherever memory ends.
struct CodesOfRow {
  const Codewords& words;
  const uint8_t* codes;
  int first, bytes;
  uint8_t copy[MAX_DIM + BEHIND];

  CodesOfRow(const Codewords& words, int head)
      : words(words), codes(words.codes + head * words.head), first(words.span[2 * head]), bytes(words.span[2 * head + 1]) {}

  // Bytes of a token: those of place p begin at p / 8.
  const uint8_t* of(int token) {
    const uint8_t* own = codes + token * words.row + first;
    if (words.end - own >= bytes + BEHIND) return own - first;
    memcpy(copy, own, bytes), memset(copy + bytes, 0, BEHIND);
    return copy - first;
  }
};

inline int code_at(const uint8_t* codes, int place, int bits) {
  uint16_t both;
  memcpy(&both, codes + place / 8, 2);
  return both >> (place % 8) & ((1 << bits) - 1);
}

// Runs of SIZE entries whose codes are neighbours of as many bits each: eight at a time are whole bytes.
template <int SIZE, class T>
void runs_of(const Codewords& words, const T* values, const uint8_t* codes, const int64_t* table, int bits, T* out) {
  const uint64_t mask = (1u << bits) - 1;
  for (int i = 0; i < words.count; codes += bits) {
    uint64_t eight;
    memcpy(&eight, codes, 8);
    for (const int stop = i + 8 < words.count ? i + 8 : words.count; i < stop; i++, eight >>= bits)
      memcpy(out + SIZE * i, values + table[i] + SIZE * (eight & mask), SIZE * sizeof(T));
  }
}

// The entries of a row of runs (or of parts, runs of one) in the order of its codes.
template <class T>
void decode_runs(const Codewords& words, const T* values, int head, const uint8_t* codes, T* out) {
  const int64_t own = int64_t(head) * words.count;
  const int32_t* place = words.place + own;
  const uint8_t* bits = words.bits + own;
  const int64_t* table = words.table + own;
  if (words.alike && words.form == Form::RUNS) {
    codes += place[0] / 8;
    if (words.size == 4) return runs_of<4>(words, values, codes, table, bits[0], out);
    if (words.size == 8) return runs_of<8>(words, values, codes, table, bits[0], out);
  }
  for (int i = 0; i < words.count; i++)
    memcpy(out + words.size * i, values + table[i] + int64_t(words.size) * code_at(codes, place[i], bits[i]), words.size * sizeof(T));
}

// The entries of a row in the order of its codes.
void decode_row(const Codewords& words, int head, const uint8_t* codes, float* out) {
  const int entries = words.size * words.count;
  if (words.halves) {
    alignas(64) uint16_t row[MAX_DIM];
    decode_runs(words, words.halves, head, codes, row);
    int i = 0;
    for (; i + W <= entries; i += W) store(out + i, load_half(row + i));
    for (; i < entries; i++) out[i] = half(row[i]);
    return;
  }
  if (words.form != Form::PLANES) return decode_runs(words, words.values, head, codes, out);
  const int64_t own = int64_t(head) * words.count;
  for (int i = 0; i < words.count; i++) {
    const float* values = words.values + words.table[own + i];
    const int bits = words.bits[own + i], code = code_at(codes, words.place[own + i], bits);
    out[i] = values[code], out[words.count + i] = values[plane_values(bits) + code];
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

// Components of a tile of tokens, one after another: y[i][TILE]. Codes are bytes; tokens behind `count` have any components.
void decode_parts(const Rows& rows, int head, int from, int count, float* y) {
  const Codewords& words = rows.words;
  const int64_t own = int64_t(head) * words.count;
  const int first = words.span[2 * head], bytes = words.span[2 * head + 1];
  uint32_t turned[(MAX_DIM + 3) / 4 * TILE];
  if (count <= TILE - W) memset(turned, 0, (bytes + 3) / 4 * TILE * sizeof(uint32_t));
  turn_rows(words.codes + head * words.head + from * words.row + first, words.end, words.row, bytes, count, turned, TILE);
  for (int i = 0; i < words.count; i++) {
    const Lookup<8> lookup(words.values + words.table[own + i]);
    const int byte = words.place[own + i] / 8 - first;
    for (int t = 0; t < TILE; t += W) store(y + i * TILE + t, lookup.of(load_words(turned + byte / 4 * TILE + t) >> uint32_t(byte % 4 * 8)));
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
