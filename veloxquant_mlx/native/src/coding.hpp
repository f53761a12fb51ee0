// Encoding, as plain numbers and pointers: what the bindings check and every SIMD level reads. As in problem.hpp, no inline functions.
#pragma once
#include "problem.hpp"

namespace kvtool {

// Rows of floats as they lie in an MLX array, and the rotary embedding that is undone first.
struct Input {
  Type type;
  int heads, count, dim;
  const uint8_t* data;
  int64_t head, row;  // strides in bytes
  Angles undo;        // or none
  int rope_first;
  bool interleaved;  // the rotated entries: they are coded half-split
  float ratio;       // of magnitudes
};

// What coding lost.
struct Loss {
  double error, energy;  // sums of squares: of rows less decoded rows, and of rows
};

enum class Scale : int { NORM, LS, UNBIASED };

// y = T diag(signs) x' / s0, coded by up to two tables; codes and scale are (H, S, ...) without gaps.
struct RotatedCoding {
  Input input;
  int stages;
  struct {
    int bits;
    const float* boundaries;  // 2^bits - 1, ascending
    const float* codewords;   // 2^bits, repeated to at least 16
    uint8_t* codes;
  } stage[2];
  bool ties_up;          // a value on a boundary belongs to the cell above it
  Scale kind;
  const uint16_t* mean;  // (H, D) bfloat16, or nullptr
  const float* signs;
  const float* hartley;
  int odd;
  const float* steps;  // of the candidate grids, or nullptr: the one stage has a grid of odd numbers, scaled to each row
  int candidates;
  uint16_t* scale;  // (H, S) bfloat16
};

// x = code step + zero, a step and a zero for each channel and `group` tokens, or for each token and `group` channels.
struct AffineCoding {
  Input input;
  int bits, group;
  bool by_token;
  uint8_t* codes;
  uint16_t* step;
  uint16_t* zero;
};

// Signs of S x', S blocks of two rotations one after the other, and |x'|; a sign is 1 where it is not negative.
struct SignCoding {
  Input input;
  int blocks;
  const float* turns;  // (blocks, 2, D): signs of the first rotation and of the second
  const float* hartley;
  int odd;
  const uint16_t* mean;  // (H, D) bfloat16, or nullptr
  uint8_t* codes;        // (H, S, ceil(blocks D / 8))
  uint16_t* norm;        // (H, S) bfloat16
};

// All return whether every value was finite and of a size that sums can take; losses are added to what is there.
struct Encoder {
  bool (*rotated)(const RotatedCoding&, int head, int from, int count, Loss&);
  bool (*affine)(const AffineCoding&, int head, int from, int count, Loss&);  // of whole groups
  bool (*signs)(const SignCoding&, int head, int from, int count);
  void (*sum)(const Input&, int head, int from, int count, double* out);  // (D), added to what is there
};

}  // namespace kvtool
