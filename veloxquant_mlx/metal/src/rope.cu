// Rotation of pairs (d, d + D/2).

struct RopeTurn {
  float cosine;
  float sine;
};

// cos and sin of position * frequency. The product is taken exactly (in two floats) and reduced to [-pi, pi] before it is rounded,
// so that the error stays at 3e-7 for every |position| < 2^24.
__device__ inline RopeTurn rope_turn(float position, float frequency) {
  constexpr float TURN = 6.2831854820251465f;  // 2 pi as a float, and what it lacks
  constexpr float TURN_REST = -1.7484555314695172e-07f;
  const float angle = __fmul_rn(position, frequency);
  const float angle_rest = __fmaf_rn(position, frequency, -angle);
  const float turns = rintf(__fdiv_rn(angle, TURN));
  const float whole = __fmul_rn(turns, TURN);
  const float whole_rest = __fmaf_rn(turns, TURN, -whole);
  const float rest = __fsub_rn(angle_rest, whole_rest);
  const float small = __fsub_rn(__fadd_rn(__fsub_rn(angle, whole), rest), __fmul_rn(turns, TURN_REST));
  return {cosf(small), sinf(small)};
}

// One rounding per operation, as in the MLX definition.
__device__ inline float rope_first(float a, float b, RopeTurn turn) {
  return __fsub_rn(__fmul_rn(a, turn.cosine), __fmul_rn(b, turn.sine));
}

__device__ inline float rope_second(float a, float b, RopeTurn turn) {
  return __fadd_rn(__fmul_rn(a, turn.sine), __fmul_rn(b, turn.cosine));
}

// keys (BH, N, D) by a table of cosines and sines (N, D/2); one thread per (row, pair), `i` over N * D/2, and per head group.
template <int D, typename X>
__device__ inline void rope_by_table(
    const X* keys, const float* cosines, const float* sines, const int* dims, X* out, unsigned i, unsigned head) {
  constexpr unsigned HALF = D / 2;
  if (i >= unsigned(dims[0]) * HALF || head >= unsigned(dims[1])) {
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
__device__ inline float rope_coded(const I* indices, const C* codebook, unsigned count, unsigned d) {
  const unsigned part = d / SUB_DIM;
  const unsigned index = min(unsigned(indices[part]), count - 1u);
  return float(codebook[(part * count + index) * SUB_DIM + d % SUB_DIM]);
}

// Rows (N, D) decoded from such a codebook and rotated; one thread per (row, pair). dims: N, count.
template <int D, int SUB_DIM, typename I, typename C>
__device__ inline void rope_decode(
    const I* indices,
    const C* codebook,
    const int* positions,
    const float* frequencies,
    const int* dims,
    __half* out,
    unsigned i) {
  constexpr unsigned HALF = D / 2;
  const unsigned row = i / HALF;
  const unsigned d = i % HALF;
  if (row >= unsigned(dims[0])) {
    return;
  }
  const I* codes = indices + size_t(row) * size_t(D / SUB_DIM);
  const float a = rope_coded<SUB_DIM>(codes, codebook, unsigned(dims[1]), d);
  const float b = rope_coded<SUB_DIM>(codes, codebook, unsigned(dims[1]), d + HALF);
  const RopeTurn turn = rope_turn(float(positions[row]), frequencies[d]);
  const size_t at = size_t(row) * D + d;
  out[at] = __float2half_rn(rope_first(a, b, turn));
  out[at + HALF] = __float2half_rn(rope_second(a, b, turn));
}
