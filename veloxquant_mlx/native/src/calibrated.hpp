// Coding of keys by components and of values by what those predict, as plain numbers and pointers: what the bindings check and every SIMD
// level reads. As in problem.hpp, no inline functions.
#pragma once
#include "problem.hpp"

namespace kvtool {

constexpr int PANEL = 8;  // rows of a matrix whose entries lie together, column by column; the last panel is filled up with zeros

// Cells of scalar quantisers: tables of boundaries in the order that a search by halves asks for them, step by step (`search_table`).
struct Cells {
  const float* boundaries;
  const int32_t* table;  // (n): where those of each component begin
  const uint8_t* bits;   // (n)
  const int32_t* place;  // (n): of each in a block of 32 tokens, in bytes
  int64_t block;         // bytes of one
};

// y = (x - mean) forward.
struct Projection {
  int heads, dim;
  const int32_t* first;    // (H + 1): components of head h are first[h] to first[h + 1]
  const float* mean;       // (H, D)
  const float* forward;    // of each head panels of its components, (D, PANEL) each
  const int32_t* panels;   // (H + 1): those of head h are panels[h] to panels[h + 1]
};

struct KeyCoding {
  Projection to;
  Cells cells;
  Rows x;  // floats
  uint8_t* codes;
};

// v ~ mean + mix y of the components y of all heads' keys; what is left is turned and coded.
struct ValueCoding {
  Projection to;
  const float* mean;     // (H, D)
  const float* mix;      // of each head of values and each head of keys, panels of D rows: (components of that head, PANEL) each
  const float* signs;    // (D), of the rotation
  const float* hartley;  // (odd, odd), D = odd 2^k
  int odd;
  Rows keys;  // floats, before RoPE
  // Encoding.
  Cells cells;
  Rows x;                // floats
  const float* points;   // of each head, 2^bits repeated to at least 16
  const int32_t* point;  // (H): where those of each begin
  uint8_t* codes;
  float* sizes;  // (H, S)
  // Decoding.
  Components components, scales;
  Type type;  // of the result; FLOAT16 is clipped to its finite numbers
  uint8_t* out;
};

// Tokens from .. from + count, from a multiple of 32. Encoders return whether every value was finite and of a size that sums can take.
struct Calibrated {
  size_t (*key_scratch)(const Projection&);    // floats
  size_t (*value_scratch)(const Projection&);  // floats
  bool (*encode_keys)(const KeyCoding&, int head, int from, int count, float* scratch);
  bool (*encode_values)(const ValueCoding&, int from, int count, float* scratch);  // of all heads
  void (*decode_values)(const ValueCoding&, int from, int count, float* scratch);
};

}  // namespace kvtool
