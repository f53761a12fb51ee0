// Rows of floats to codes of codewords, 64 tokens at a time: what is searched for is never stored.
#pragma once
#include "floats.hpp"
#include "nearest.hpp"
#include "search.hpp"
#include "simd.hpp"
#include "sylvester.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

// Codes of a row, one a byte, to bits.
void pack_row(const uint8_t* codes, int count, const int32_t* place, const uint8_t* bits, int64_t bytes, uint8_t* out) {
  memset(out, 0, bytes);
  for (int i = 0; i < count; i++) {
    if (!bits[i]) continue;
    const uint32_t code = (codes[i] & ((1u << bits[i]) - 1)) << (place[i] % 8);
    uint8_t* at = out + place[i] / 8;
    at[0] |= uint8_t(code);
    if (place[i] % 8 + bits[i] > 8) at[1] |= uint8_t(code >> 8);
  }
}

// Codes of a row that all have as many bits; there is room for 8 more of them.
void pack_alike(uint8_t* codes, int count, int bits, int64_t bytes, uint8_t* out) {
  if (bits == 8) {
    memcpy(out, codes, count);
    return;
  }
  memset(codes + count, 0, 8);
  for (int i = 0; i < count; i += 8, out += bits, bytes -= bits) {
    uint64_t word;
    memcpy(&word, codes + i, 8);
    // Lanes of 8, 16 and 32 bits are merged in pairs.
    word = (word & 0x00ff00ff00ff00ffull) | (word >> 8 & 0x00ff00ff00ff00ffull) << bits;
    word = (word & 0x0000ffff0000ffffull) | (word >> 16 & 0x0000ffff0000ffffull) << 2 * bits;
    word = (word & 0x00000000ffffffffull) | (word >> 32) << 4 * bits;
    memcpy(out, &word, bits < bytes ? bits : bytes);
  }
}

// Rows of floats, padded, and what is there in place of those from `count` on: zeros.
void read_tile(const Rows& rows, int head, int from, int count, float* tile) {
  const int width = padded(rows.dim);
  decode_floats(rows, head, from, count, tile);
  memset(tile + count * width, 0, sizeof(float) * (AT_ONCE - count) * width);
}

// Entry i of token t at x[i][t].
void turn_tile(const float* tile, int dim, float* x) {
  const int width = padded(dim);
  const auto* bytes = reinterpret_cast<const uint8_t*>(tile);
  turn_rows(bytes, bytes + 4 * AT_ONCE * width, 4 * width, 4 * dim, AT_ONCE, reinterpret_cast<uint32_t*>(x), AT_ONCE);
}

void code_runs(const RunCoding& c, int head, int from, int count) {
  const int dim = c.x.dim, width = padded(dim), runs = c.runs;
  const float norm = 1 / __builtin_sqrtf(float(dim));
  alignas(64) float tile[AT_ONCE * MAX_DIM], x[AT_ONCE * MAX_DIM], own[AT_ONCE * 8];
  alignas(64) uint8_t codes[AT_ONCE][MAX_DIM + 8];
  int32_t nearest[AT_ONCE];
  for (int start = 0; start < count; start += AT_ONCE) {
    const int some = count - start < AT_ONCE ? count - start : AT_ONCE;
    read_tile(c.x, head, from + start, some, tile);
    for (int t = 0; c.divisor && t < some; t++) {
      float* row = tile + t * width;
      const float* divisor = c.divisor + int64_t(head) * dim;
      for (int i = 0; i < dim; i++) row[i] = row[i] * c.unit / divisor[i];
      sylvester(row, dim);
      for (int i = 0; i < dim; i++) row[i] *= norm;
    }
    turn_tile(tile, dim, x);
    for (int i = 0; !c.divisor && c.unit != 1 && i < dim * AT_ONCE; i += W) store(x + i, load(x + i) * c.unit);
    for (int r = 0; r < runs; r++) {
      const float* entries = x + r * c.size * AT_ONCE;
      if (c.order) {
        for (int i = 0; i < c.size; i++) memcpy(own + i * AT_ONCE, x + c.order[r * c.size + i] * AT_ONCE, sizeof(float) * AT_ONCE);
        entries = own;
      }
      const int table = head * runs + r, first = c.first[table];
      nearest_of(entries, c.size, c.words + int64_t(first) * c.size, Squares<float>{c.half + first, c.largest[table]}, c.number, nearest);
      for (int t = 0; t < some; t++) codes[t][r] = uint8_t(nearest[t]);
    }
    uint8_t* out = c.codes + (int64_t(head) * c.x.count + from + start) * c.bytes;
    for (int t = 0; t < some; t++) pack_alike(codes[t], runs, c.bits, c.bytes, out + t * c.bytes);
  }
}

void code_planes(const PlaneCoding& c, int head, int from, int count) {
  const int dim = c.x.dim, planes = dim / 2;
  const float *mean = c.mean + int64_t(head) * dim, *turn = c.turn + int64_t(head) * planes * 3;
  const int64_t every = int64_t(head) * (planes + 1);
  alignas(64) float tile[AT_ONCE * MAX_DIM], x[AT_ONCE * MAX_DIM], z[2 * AT_ONCE];
  uint8_t codes[AT_ONCE][MAX_DIM / 2 + 1];
  int32_t nearest[AT_ONCE];
  for (int start = 0; start < count; start += AT_ONCE) {
    const int some = count - start < AT_ONCE ? count - start : AT_ONCE;
    read_tile(c.x, head, from + start, some, tile);
    turn_tile(tile, dim, x);
    for (int t = 0; t < some; t++) codes[t][0] = from + start + t == c.kept[head];
    for (int p = 0; p < planes; p++) {
      const int bits = c.bits[every + 1 + p], i = c.planes[p], j = c.planes[planes + p];
      if (!bits) continue;
      const float a = turn[3 * p], b = turn[3 * p + 1], factor = turn[3 * p + 2];
      for (int t = 0; t < AT_ONCE; t += W) {
        const V real = load(x + i * AT_ONCE + t) - mean[i], imaginary = load(x + j * AT_ONCE + t) - mean[j];
        store(z + t, (a * real - b * imaginary) * factor), store(z + AT_ONCE + t, (a * imaginary + b * real) * factor);
      }
      nearest_of<float, 2>(z, c.words + 2 * ((1 << bits) - 1), 1 << bits, nearest);
      for (int t = 0; t < some; t++) codes[t][1 + p] = uint8_t(nearest[t]);
    }
    uint8_t* out = c.codes + (int64_t(head) * c.x.count + from + start) * c.bytes;
    for (int t = 0; t < some; t++) pack_row(codes[t], planes + 1, c.place + every, c.bits + every, c.bytes, out + t * c.bytes);
  }
}

void far_from(const Farness& f, int head, int from, int count) {
  const int dim = f.x.dim;
  const float *middle = f.middle + int64_t(head) * dim, *inverse = f.inverse + int64_t(head) * dim;
  alignas(64) float tile[AT_ONCE * MAX_DIM], x[AT_ONCE * MAX_DIM], found[AT_ONCE];
  auto part = [](V size, float factor) {
    const V product = (size < 0 ? -size : size) * factor;
    return product < all(1e15f) ? product : all(1e15f);
  };
  for (int start = 0; start < count; start += AT_ONCE) {
    const int some = count - start < AT_ONCE ? count - start : AT_ONCE;
    read_tile(f.x, head, from + start, some, tile);
    turn_tile(tile, dim, x);
    for (int t = 0; t < AT_ONCE; t += W) {
      V far{}, near{};
      for (int i = 0; i < dim; i++) {
        const V value = load(x + i * AT_ONCE + t);
        far += part(value - middle[i], inverse[i]), near += part(value, inverse[i]);
      }
      far = far / float(dim), near = near / float(dim);
      store(found + t, far * far / (near > all(1e-6f) ? near : all(1e-6f)));
    }
    memcpy(f.out + int64_t(head) * f.x.count + from + start, found, sizeof(float) * some);
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
