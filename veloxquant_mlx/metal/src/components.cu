// Attention to keys and values coded in components of unlike widths, values predicted from the keys' components of all heads.
//
//     s[i, j] = q[i] . R_j (basis^T y[j] + mean)                        y: the keys' components, of each head
//     out[i]  = (sum_j w size[j] z[j]) R + (sum_j w y[j]) M + constant  z: the values'; w = 2^(s - m) / l, M and y of all heads
//
// Two passes, for the sums of y are over the weights of all heads: scores, then sums of components. A component's codes of 32 tokens are as
// many words as a code has bits. A pass cuts the tokens into splits of such blocks. After attend.cu and coded.cu.

namespace kvtool {

constexpr int COMPONENT_TOKENS = 32;  // of a block of codes
constexpr int COMPONENT_WARPS = 8;
constexpr int COMPONENT_ROWS = 8;  // queries of a threadgroup

// Where the sizes stand in `dims` of scores.
enum ComponentDims {
  COMPONENT_QUERIES,  // query rows of a KV head
  COMPONENT_COUNT,    // rows attended to
  COMPONENT_SPLITS,
  COMPONENT_FROM,        // first of them among the stored rows
  COMPONENT_WORDS,       // of a block of codes; bytes of a row of codes
  COMPONENT_MASK_HEADS,  // scores: heads of the mask, 1 or all
  COMPONENT_ALL,         // components of all heads
  COMPONENT_HEADS,
  COMPONENT_TOPS,  // sums: splits of the scores
};

// Scalar quantisers beside each other: component i has `bits` from word `place` of a block on, and points from `table` on.
struct ComponentCodes {
  const uint32_t* codes;
  const int* quantisers;  // (n, 4): place, bits, table, 0
  const float* points;

  struct One {
    const uint32_t* words;  // of the first block
    const float* points;
    int bits;

    __device__ __forceinline__ uint32_t code(size_t from, int token) const {
      const int bit = token * bits;
      const int shift = bit % 32;
      const uint32_t* at = words + from + bit / 32;
      uint32_t code = __ldg(at) >> shift;
      if (shift + bits > 32) {
        code |= __ldg(at + 1) << (32 - shift);
      }
      return code & ((1u << bits) - 1);
    }
    // Of token `token` of a block, blocks of `each` words.
    __device__ __forceinline__ float at(int block, int each, int token, int) const {
      return __ldg(points + code(size_t(block) * each, token));
    }
  };

  __device__ __forceinline__ One one(int i) const {
    return {codes + __ldg(quantisers + 4 * i), points + __ldg(quantisers + 4 * i + 2), __ldg(quantisers + 4 * i + 1)};
  }
};

// The same where a row's codes stand together: component i has the one in byte `place`, which other components may share.
struct ComponentRows {
  const uint8_t* codes;
  const int* quantisers;
  const float* points;

  struct One {
    const uint8_t* bytes;  // of the first row
    const float* points;

    // Rows of `each` bytes, `last` the last one that is read.
    __device__ __forceinline__ float at(int block, int each, int token, int last) const {
      return __ldg(points + __ldg(bytes + size_t(min(block * COMPONENT_TOKENS + token, last)) * each));
    }
  };

  __device__ __forceinline__ One one(int i) const {
    return {codes + __ldg(quantisers + 4 * i), points + __ldg(quantisers + 4 * i + 2)};
  }
};

// Blocks of a split.
struct ComponentSpan {
  int start;
  int count;
  int first;
  int stop;

  __device__ __forceinline__ ComponentSpan(const int* dims, int split) : start(dims[COMPONENT_FROM]), count(dims[COMPONENT_COUNT]) {
    const int begin = start / COMPONENT_TOKENS;
    const int blocks = (start + count - 1) / COMPONENT_TOKENS + 1 - begin;
    const int each = (blocks + dims[COMPONENT_SPLITS] - 1) / dims[COMPONENT_SPLITS];
    first = begin + each * split;
    stop = begin + min(each * (split + 1), blocks);
  }
  // Of token `token` of a block, its place among the rows attended to; not below 0 and below `count` where it is none of them.
  __device__ __forceinline__ int place(int block, int token) const {
    return block * COMPONENT_TOKENS + token - start;
  }
  __device__ __forceinline__ bool has(int place) const {
    return place >= 0 && place < count;
  }
};

// The largest of a warp.
__device__ __forceinline__ float component_largest(float x) {
  ATTEND_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Scores of one KV head's queries, in log2, and the largest of each split. Lanes are tokens; warps share the pairs of channels that RoPE
// turns together. y: D * 32 floats of shared memory; parts: warps * rows * 32.
template <int D, bool ROPE, bool MASKED, typename M, typename Codes>
__device__ __forceinline__ void component_scores(
    const float* q,
    const float* angles,
    const M* mask,
    const int* dims,
    const int* first,
    const float* basis,
    float* scores,
    float* tops,
    Codes codes,
    float* y,
    float* parts) {
  constexpr int ROWS = COMPONENT_ROWS;
  constexpr int RUN = 4;  // pairs at once
  const int warp = int(threadIdx.x) / 32;
  const int lane = int(threadIdx.x) % 32;
  const int queries = dims[COMPONENT_QUERIES];
  const int blocks = (queries + ROWS - 1) / ROWS;
  const int head = int(blockIdx.x) / blocks;
  const int row0 = int(blockIdx.x) % blocks * ROWS;
  const int rows = min(ROWS, queries - row0);
  const int begin = first[head];
  const int size = first[head + 1] - begin;
  const float* back = basis + size_t(begin) * D;
  const float* mean = basis + size_t(dims[COMPONENT_ALL] + head) * D;
  const float* query = q + (size_t(head) * queries + row0) * D;
  const ComponentSpan span(dims, int(blockIdx.y));
  float top = -ATTEND_INF;
  for (int block = span.first; block < span.stop; block++) {
    for (int i = warp; i < size; i += COMPONENT_WARPS) {
      y[i * COMPONENT_TOKENS + lane] = codes.one(begin + i).at(block, dims[COMPONENT_WORDS], lane, span.start + span.count - 1);
    }
    __syncthreads();
    const int place = span.place(block, lane);
    const float* turn = angles + size_t(min(max(place, 0), span.count - 1)) * D;
    float s[ROWS] = {};
    for (int j = warp * RUN; j < D / 2; j += COMPONENT_WARPS * RUN) {
      float a[RUN];
      float b[RUN];
      ATTEND_UNROLL
      for (int e = 0; e < RUN; e++) {
        a[e] = __ldg(mean + j + e);
        b[e] = __ldg(mean + D / 2 + j + e);
      }
      for (int i = 0; i < size; i++) {
        const float own = y[i * COMPONENT_TOKENS + lane];
        ATTEND_UNROLL
        for (int e = 0; e < RUN; e++) {
          a[e] = fmaf(own, __ldg(back + size_t(i) * D + j + e), a[e]);
          b[e] = fmaf(own, __ldg(back + size_t(i) * D + D / 2 + j + e), b[e]);
        }
      }
      ATTEND_UNROLL
      for (int e = 0; e < RUN; e++) {
        float x = a[e];
        float z = b[e];
        if (ROPE) {
          const float cosine = __ldg(turn + j + e);
          const float sine = __ldg(turn + D / 2 + j + e);
          x = fmaf(cosine, a[e], -sine * b[e]);
          z = fmaf(cosine, b[e], sine * a[e]);
        }
        ATTEND_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const float* own = query + min(r, rows - 1) * D + j + e;
          s[r] = fmaf(__ldg(own), x, fmaf(__ldg(own + D / 2), z, s[r]));
        }
      }
    }
    ATTEND_UNROLL
    for (int r = 0; r < ROWS; r++) {
      parts[(warp * ROWS + r) * COMPONENT_TOKENS + lane] = s[r];
    }
    __syncthreads();
    if (warp < rows) {  // a row for each warp
      float sum = 0;
      ATTEND_UNROLL
      for (int w = 0; w < COMPONENT_WARPS; w++) {
        sum += parts[(w * ROWS + warp) * COMPONENT_TOKENS + lane];
      }
      if (span.has(place)) {
        const size_t row = size_t(head) * queries + row0 + warp;
        const size_t masked = size_t(dims[COMPONENT_MASK_HEADS] > 1 ? head : 0) * queries + row0 + warp;
        const bool seen = !MASKED || coded_seen(mask[masked * span.count + place], sum);
        sum = seen ? sum : -ATTEND_INF;
        scores[row * span.count + place] = sum;
        top = fmaxf(top, sum);
      }
    }
  }
  top = component_largest(top);
  if (warp < rows && lane == 0) {
    tops[(size_t(head) * queries + row0 + warp) * dims[COMPONENT_SPLITS] + blockIdx.y] = top;
  }
}

// Sizes of the values' rows: codes of 6 bits, and 64 sizes a head.
struct ComponentSizes {
  static constexpr int BITS = 6;
  const uint32_t* codes;
  const float* sizes;

  __device__ __forceinline__ float at(int head, int heads, int block, int token) const {
    const ComponentCodes::One one{codes + head * BITS, sizes + head * (1 << BITS), BITS};
    return one.at(block, heads * BITS, token, 0);
  }
};

// The largest score of a row, 0 for one that sees nothing.
__device__ __forceinline__ float component_top(const float* tops, size_t row, int splits) {
  float top = -ATTEND_INF;
  for (int i = 0; i < splits; i++) {
    top = fmaxf(top, tops[row * splits + i]);
  }
  return top == -ATTEND_INF ? 0.0f : top;
}

// Sums over tokens of weight times component, of one head's components: with the weights of all rows, or (OWN) with those of the head's
// own rows times the sizes of the values. A thread has a component. weights: rows * 32 floats of shared memory.
template <bool OWN>
__device__ __forceinline__ void component_sums(
    const float* scores,
    const float* tops,
    const int* dims,
    const int* first,
    float* sums,
    float* totals,
    ComponentCodes codes,
    ComponentSizes sizes,
    float* weights) {
  constexpr int ROWS = COMPONENT_ROWS;
  const int warp = int(threadIdx.x) / 32;
  const int lane = int(threadIdx.x) % 32;
  const int heads = dims[COMPONENT_HEADS];
  const int every = dims[COMPONENT_QUERIES] * heads;  // rows
  const int queries = OWN ? dims[COMPONENT_QUERIES] : every;
  const int blocks = (queries + ROWS - 1) / ROWS;
  const int head = int(blockIdx.x) / blocks;
  const int row0 = int(blockIdx.x) % blocks * ROWS;
  const int rows = min(ROWS, queries - row0);
  const size_t row1 = size_t(OWN ? head * queries : 0) + row0;
  const int begin = first[head];
  const int size = first[head + 1] - begin;
  const int own = int(threadIdx.x) < size ? begin + int(threadIdx.x) : begin;
  const ComponentSpan span(dims, int(blockIdx.y));
  const float top = warp < rows ? component_top(tops, row1 + warp, dims[COMPONENT_TOPS]) : 0.0f;
  float total = 0;
  float sum[ROWS] = {};
  for (int block = span.first; block < span.stop; block++) {
    const int place = span.place(block, lane);
    float weight = 0;
    if (warp < rows && span.has(place)) {
      weight = exp2f(scores[(row1 + warp) * span.count + place] - top);
      total += weight;
      weight *= OWN ? sizes.at(head, heads, block, lane) : 1.0f;
    }
    __syncthreads();
    weights[lane * ROWS + warp] = weight;
    __syncthreads();
    if (int(threadIdx.x) < size) {
      const ComponentCodes::One one = codes.one(own);
      for (int token = 0; token < COMPONENT_TOKENS; token++) {
        const float y = one.at(block, dims[COMPONENT_WORDS], token, 0);
        ATTEND_UNROLL
        for (int r = 0; r < ROWS; r++) {
          sum[r] = fmaf(weights[token * ROWS + r], y, sum[r]);
        }
      }
    }
  }
  if (int(threadIdx.x) < size) {
    ATTEND_UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (r < rows) {
        const int column = OWN ? int(threadIdx.x) : own;
        const int columns = OWN ? size : dims[COMPONENT_ALL];
        sums[(size_t(blockIdx.y) * every + row1 + r) * columns + column] = sum[r];
      }
    }
  }
  ATTEND_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, offset);
  }
  if (warp < rows && lane == 0 && (OWN || head == 0)) {
    totals[size_t(blockIdx.y) * every + row1 + warp] = total;
  }
}

}  // namespace kvtool
