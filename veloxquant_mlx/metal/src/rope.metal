// Rotation of pairs (d, d + D/2).

struct RopeTurn {
  float cosine;
  float sine;
};

// cos and sin of position * frequency. The product is taken exactly (in two floats) and reduced to [-pi, pi] before it is rounded,
// so that the error stays at 3e-7 for every |position| < 2^24.
METAL_FUNC RopeTurn rope_turn(float position, float frequency) {
#pragma clang fp contract(off)
  constexpr float TURN = 6.2831854820251465f;  // 2 pi as a float, and what it lacks
  constexpr float TURN_REST = -1.7484555314695172e-07f;
  const float angle = position * frequency;
  const float angle_rest = metal::fma(position, frequency, -angle);
  const float turns = metal::rint(angle / TURN);
  const float whole = turns * TURN;
  const float whole_rest = metal::fma(turns, TURN, -whole);
  const float small = ((angle - whole) + (angle_rest - whole_rest)) - turns * TURN_REST;
  return {metal::cos(small), metal::sin(small)};
}

METAL_FUNC float rope_first(float a, float b, RopeTurn turn) {
#pragma clang fp contract(off)  // one rounding per operation, as in the MLX definition
  const float kept = a * turn.cosine;
  const float crossed = b * turn.sine;
  return kept - crossed;
}

METAL_FUNC float rope_second(float a, float b, RopeTurn turn) {
#pragma clang fp contract(off)
  const float crossed = a * turn.sine;
  const float kept = b * turn.cosine;
  return crossed + kept;
}

// keys (BH, N, D) by a table of cosines and sines (N, D/2); one thread per (row, pair), `i` over N * D/2, and per head group.
template <int D, typename X>
METAL_FUNC void rope_by_table(
    const device X* keys, const device float* cosines, const device float* sines, const device int* dims, device X* out, uint i, uint head) {
  constexpr uint HALF = D / 2;
  if (i >= uint(dims[0]) * HALF || head >= uint(dims[1])) {
    return;
  }
  const size_t at = (size_t(head) * size_t(dims[0]) + size_t(i / HALF)) * D + i % HALF;
  const float a = float(keys[at]);
  const float b = float(keys[at + HALF]);
  const RopeTurn turn = {cosines[i], sines[i]};
  out[at] = X(rope_first(a, b, turn));
  out[at + HALF] = X(rope_second(a, b, turn));
}

// One entry of a row coded by a product codebook (parts, count, SUB_DIM); an index out of range reads the last codeword.
template <int SUB_DIM, typename I, typename C>
METAL_FUNC float rope_coded(const device I* indices, const device C* codebook, uint count, uint d) {
  const uint part = d / SUB_DIM;
  const uint index = metal::min(uint(indices[part]), count - 1u);
  return float(codebook[(part * count + index) * SUB_DIM + d % SUB_DIM]);
}

// Rows (N, D) decoded from such a codebook and rotated; one thread per (row, pair). dims: N, count.
template <int D, int SUB_DIM, typename I, typename C>
METAL_FUNC void rope_decode(
    const device I* indices,
    const device C* codebook,
    const device int* positions,
    const device float* frequencies,
    const device int* dims,
    device half* out,
    uint i) {
  constexpr uint HALF = D / 2;
  const uint row = i / HALF;
  const uint d = i % HALF;
  if (row >= uint(dims[0])) {
    return;
  }
  const device I* codes = indices + size_t(row) * size_t(D / SUB_DIM);
  const float a = rope_coded<SUB_DIM>(codes, codebook, uint(dims[1]), d);
  const float b = rope_coded<SUB_DIM>(codes, codebook, uint(dims[1]), d + HALF);
  const RopeTurn turn = rope_turn(float(positions[row]), frequencies[d]);
  const size_t at = size_t(row) * D + d;
  out[at] = half(rope_first(a, b, turn));
  out[at + HALF] = half(rope_second(a, b, turn));
}
