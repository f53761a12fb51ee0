// Complex codewords of the planes of RoPE, with the tokens in the lanes: every plane has a number of bits and a table of its own.
#pragma once
#include "codewords.hpp"
#include "columns.hpp"
#include "problem.hpp"
#include "simd.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

int words_of(const Codewords& words, int head) { return (words.span[2 * head + 1] + 3) / 4; }

// The words of a head's codes, tokens `from` to from + count, in `out`.
Turned turned(const Codewords& words, int head, int from, int count, uint32_t* out, int64_t row) {
  const uint8_t* first = words.codes + head * words.head + from * words.row;
  turn_rows(first, words.end, words.row, words.span[2 * head + 1], count, out, row);
  return {out, row};
}

// Codes of `bits` bits from any `bit` on, in the lowest bits of their lanes, whatever is above.
inline Words codes_from(Turned words, int bit, int bits) {
  const uint32_t* at = words.at + bit / 32 * words.row;
  Words code = load_words(at) >> uint32_t(bit % 32);
  if (bit % 32 + bits > 32) code |= load_words(at + words.row) << uint32_t(32 - bit % 32);
  return code;
}

// Rows of one tile, entry by entry: y[d][TILE].
void tile_planes(const Rows& rows, int head, Turned words, int t, int count, float* y) {
  const Codewords& c = rows.words;
  const int64_t own = int64_t(head) * c.count;
  words.at += t;
  for (int i = 0; i < c.count; i++) {
    float* real = y + (c.order ? c.order[i] : i) * TILE;
    float* imaginary = y + (c.order ? c.order[c.count + i] : c.count + i) * TILE;
    const float* values = c.values + c.table[own + i];
    const int place = c.place[own + i], bits = c.bits[own + i];
    if (bits == 0) {
      for (int j = 0; j < TILE; j += W) store(real + j, all(values[0])), store(imaginary + j, all(values[plane_values(0)]));
      continue;
    }
    with_bits(bits, [&](auto number) {
      constexpr int BITS = decltype(number)::value;
      const Lookup<BITS> first(values), second(values + plane_values(BITS));
      for (int j = 0; j < TILE; j += W) {
        const Words codes = codes_from({words.at + j, words.row}, place, BITS);
        store(real + j, first.of(codes)), store(imaginary + j, second.of(codes));
      }
    });
  }
  if (!c.exact) return;
  const float* exact = c.exact + int64_t(head) * rows.dim;
  for (int j = 0; j < count; j++)
    if (words.at[j] & 1)
      for (int d = 0; d < rows.dim; d++) y[d * TILE + j] = exact[d];
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
