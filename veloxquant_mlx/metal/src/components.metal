// Attention to keys and values coded in components of unlike widths, values predicted from the keys' components of all heads.
//
//     s[i, j] = q[i] . R_j (basis^T y[j] + mean)                        y: the keys' components, of each head
//     out[i]  = (sum_j w size[j] z[j]) R + (sum_j w y[j]) M + constant  z: the values'; w = 2^(s - m) / l, M and y of all heads
//
// Two passes, for the sums of y are over the weights of all heads: scores, then sums of components. A component's codes of 32 tokens are as
// many words as a code has bits. A pass cuts the tokens into splits of such blocks. After attend.metal and coded.metal.

namespace kvtool {

constant constexpr int COMPONENT_TOKENS = 32;  // of a block of codes
constant constexpr int COMPONENT_SIMDS = 8;    // of a threadgroup of scores
constant constexpr int COMPONENT_ROWS = 8;     // queries of a threadgroup, or of a column of them
constant constexpr int COMPONENT_PART = 64;    // components that are decoded at once

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
  COMPONENT_TOPS,        // sums: splits of the scores
};

// Scalar quantisers beside each other: component i has `bits` from word `place` of a block on, and points from `table` on.
template <bool NEAR>
struct ComponentCodes {
  const device uint* codes;
  const device int* quantisers;  // (n, 4): place, bits, table, 0
  typename Table<NEAR>::pointer points;

  METAL_FUNC uint4 quantiser(int i) const {
    return uint4(*(const device packed_uint4*)(quantisers + 4 * i));
  }

  // Of token `token` of a block, blocks of `each` words.
  METAL_FUNC float at(int i, int block, int each, int token, int) const {
    const uint4 one = quantiser(i);
    const int bits = int(one.y);
    const int shift = token * bits % 32;
    const device uint* words = codes + size_t(block) * each + one.x + token * bits / 32;
    uint code = words[0] >> shift;
    if (shift + bits > 32) {
      code |= words[1] << (32 - shift);
    }
    return points[one.z + (code & ((1u << bits) - 1))];
  }
};

// The same where a row's codes stand together: component i has the one in byte `place`, which other components may share.
struct ComponentRows {
  const device uint8_t* codes;
  const device int* quantisers;
  const device float* points;

  // Rows of `each` bytes, `last` the last one that is read.
  METAL_FUNC float at(int i, int block, int each, int token, int last) const {
    const size_t row = metal::min(block * COMPONENT_TOKENS + token, last);
    return points[quantisers[4 * i + 2] + int(codes[row * each + quantisers[4 * i]])];
  }
};

// Codes of one component, token after token: each word is loaded once.
struct ComponentStream {
  const device uint* words;
  int bits;
  uint window;
  int have;

  METAL_FUNC void start(const device uint* from, int width) {
    words = from;
    bits = width;
    window = 0;
    have = 0;
  }

  METAL_FUNC uint next() {
    uint code = window;
    if (have < bits) {
      const uint word = *words++;
      code |= word << have;
      window = word >> (bits - have);
      have += 32 - bits;
    } else {
      window >>= bits;
      have -= bits;
    }
    return code & ((1u << bits) - 1);
  }
};

// Blocks of a split.
struct ComponentSpan {
  int start;
  int count;
  int first;
  int stop;

  METAL_FUNC void load(const device int* dims, int split) {
    start = dims[COMPONENT_FROM];
    count = dims[COMPONENT_COUNT];
    const int begin = start / COMPONENT_TOKENS;
    const int blocks = (start + count - 1) / COMPONENT_TOKENS + 1 - begin;
    const int each = (blocks + dims[COMPONENT_SPLITS] - 1) / dims[COMPONENT_SPLITS];
    first = begin + each * split;
    stop = begin + metal::min(each * (split + 1), blocks);
  }
  // Of token `token` of a block, its place among the rows attended to; not below 0 and below `count` where it is none of them.
  METAL_FUNC int place(int block, int token) const {
    return block * COMPONENT_TOKENS + token - start;
  }
  METAL_FUNC bool has(int place) const {
    return place >= 0 && place < count;
  }
};

// Points into threadgroup memory, for the whole threadgroup.
METAL_FUNC void component_stage(const device float* source, threadgroup float* points, int count, uint thread_, uint threads) {
  for (uint i = thread_; i < uint(count); i += threads) {
    points[i] = source[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Scores of one KV head's queries, in log2, and the largest of each split, on 8 x 8 matrices: keys = basis^T y, channels by tokens, stay in
// the registers that RoPE and the product with the queries take them from. A SIMD-group has 8 of the first half of the channels and the
// 8 that RoPE turns with them, of all tokens of a block or of half of them. basis has 8 rows behind the last. y: COMPONENT_PART * 32
// floats; parts: SIMD-groups * rows * 32.
template <int D, bool ROPE, bool MASKED, typename Codes, typename M>
METAL_FUNC void component_scores(
    const device float* q,
    const device float* angles,
    const device M* mask,
    const device int* dims,
    const device int* first,
    const device float* basis,
    device float* scores,
    device float* tops,
    Codes codes,
    threadgroup float* y,
    threadgroup float* parts,
    uint group,
    uint split,
    uint sg,
    uint lane) {
  typedef metal::simdgroup_matrix<float, 8, 8> Matrix;
  constexpr int ROWS = COMPONENT_ROWS;
  constexpr int TOKENS = COMPONENT_TOKENS;
  constexpr int PAIRS = D / 16;                     // of 8 channels and their partners
  constexpr int SHARES = PAIRS < COMPONENT_SIMDS ? 2 : 1;  // SIMD-groups that share the tokens of a pair
  constexpr int EACH = 4 / SHARES;                  // 8 tokens at a time
  constexpr int STRIDE = COMPONENT_SIMDS / SHARES;
  constexpr int OWN = (PAIRS + STRIDE - 1) / STRIDE;
  const int queries = dims[COMPONENT_QUERIES];
  const int blocks = (queries + ROWS - 1) / ROWS;
  const int head = int(group) / blocks;
  const int row0 = int(group) % blocks * ROWS;
  const int rows = metal::min(ROWS, queries - row0);
  const int begin = first[head];
  const int size = first[head + 1] - begin;
  const device float* back = basis + size_t(begin) * D;
  const device float* mean = basis + size_t(dims[COMPONENT_ALL] + head) * D;
  const device float* query = q + (size_t(head) * queries + row0) * D;
  const int row = matrix_row(lane);
  const int column = matrix_column(lane);
  const int share = int(sg) % SHARES * EACH;  // of 8 tokens, the first
  const int pair0 = int(sg) / SHARES;
  ComponentSpan span;
  span.load(dims, int(split));

  Matrix from[OWN][2];
  ATTEND_UNROLL
  for (int o = 0; o < OWN; o++) {
    const int channel = metal::min(pair0 + o * STRIDE, PAIRS - 1) * 8 + column;
    const device float* own = query + metal::min(row, rows - 1) * D + channel;
    ATTEND_UNROLL
    for (int e = 0; e < 2; e++) {
      from[o][0].thread_elements()[e] = own[e];
      from[o][1].thread_elements()[e] = own[D / 2 + e];
    }
  }

  float top = -INFINITY;
  for (int block = span.first; block < span.stop; block++) {
    Matrix key[OWN][EACH][2];
    ATTEND_UNROLL
    for (int o = 0; o < OWN; o++) {
      const int channel = metal::min(pair0 + o * STRIDE, PAIRS - 1) * 8 + row;
      ATTEND_UNROLL
      for (int t = 0; t < EACH; t++) {
        ATTEND_UNROLL
        for (int e = 0; e < 2; e++) {
          key[o][t][0].thread_elements()[e] = mean[channel];
          key[o][t][1].thread_elements()[e] = mean[D / 2 + channel];
        }
      }
    }
    for (int part = 0; part < size; part += COMPONENT_PART) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = int(sg); i < COMPONENT_PART; i += COMPONENT_SIMDS) {
        float own = 0;
        if (part + i < size) {
          own = codes.at(begin + part + i, block, dims[COMPONENT_WORDS], int(lane), span.start + span.count - 1);
        }
        y[i * TOKENS + int(lane)] = own;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const int stop = metal::min(COMPONENT_PART, size - part);
      for (int i = 0; i < stop; i += 8) {
        Matrix own[EACH];
        ATTEND_UNROLL
        for (int t = 0; t < EACH; t++) {
          simdgroup_load(own[t], y + i * TOKENS + (share + t) * 8, TOKENS, ulong2(0, 0), false);
        }
        ATTEND_UNROLL
        for (int o = 0; o < OWN; o++) {
          const int pair = metal::min(pair0 + o * STRIDE, PAIRS - 1);
          ATTEND_UNROLL
          for (int half_ = 0; half_ < 2; half_++) {
            Matrix turned;
            simdgroup_load(turned, back + size_t(part + i) * D + half_ * (D / 2) + pair * 8, D, ulong2(0, 0), true);
            ATTEND_UNROLL
            for (int t = 0; t < EACH; t++) {
              simdgroup_multiply_accumulate(key[o][t][half_], turned, own[t], key[o][t][half_]);
            }
          }
        }
      }
    }

    Matrix s[EACH];
    ATTEND_UNROLL
    for (int t = 0; t < EACH; t++) {
      s[t] = Matrix(0.0f);
    }
    ATTEND_UNROLL
    for (int o = 0; o < OWN; o++) {
      if (pair0 + o * STRIDE < PAIRS) {
        ATTEND_UNROLL
        for (int t = 0; t < EACH; t++) {
          if (ROPE) {
            ATTEND_UNROLL
            for (int e = 0; e < 2; e++) {
              const int place = metal::clamp(span.place(block, (share + t) * 8 + column + e), 0, span.count - 1);
              const device float* turn = angles + size_t(place) * D + (pair0 + o * STRIDE) * 8 + row;
              const float cosine = turn[0];
              const float sine = turn[D / 2];
              const float a = key[o][t][0].thread_elements()[e];
              const float b = key[o][t][1].thread_elements()[e];
              key[o][t][0].thread_elements()[e] = metal::fma(cosine, a, -sine * b);
              key[o][t][1].thread_elements()[e] = metal::fma(cosine, b, sine * a);
            }
          }
          simdgroup_multiply_accumulate(s[t], from[o][0], key[o][t][0], s[t]);
          simdgroup_multiply_accumulate(s[t], from[o][1], key[o][t][1], s[t]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ATTEND_UNROLL
    for (int t = 0; t < EACH; t++) {
      simdgroup_store(s[t], parts + int(sg) * ROWS * TOKENS + (share + t) * 8, TOKENS, ulong2(0, 0), false);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(sg) < rows) {  // a row for each SIMD-group
      const int place = span.place(block, int(lane));
      float sum = 0;
      ATTEND_UNROLL
      for (int w = 0; w < STRIDE; w++) {
        const int other = w * SHARES + int(lane) / (8 * EACH);
        sum += parts[(other * ROWS + int(sg)) * TOKENS + int(lane)];
      }
      if (span.has(place)) {
        const size_t at = size_t(head) * queries + row0 + int(sg);
        const size_t masked = size_t(dims[COMPONENT_MASK_HEADS] > 1 ? head : 0) * queries + row0 + int(sg);
        const bool seen = !MASKED || coded_seen(mask[masked * span.count + place], sum);
        sum = seen ? sum : -INFINITY;
        scores[at * span.count + place] = sum;
        top = metal::max(top, sum);
      }
    }
  }
  top = simd_max(top);
  if (int(sg) < rows && lane == 0) {
    tops[(size_t(head) * queries + row0 + int(sg)) * dims[COMPONENT_SPLITS] + split] = top;
  }
}

// Sizes of the values' rows: codes of 6 bits, and 64 sizes a head.
struct ComponentSizes {
  const device uint* codes;
  const device float* sizes;

  METAL_FUNC float at(int head, int heads, int block, int token) const {
    const int shift = token * 6 % 32;
    const device uint* words = codes + (size_t(block) * heads + head) * 6 + token * 6 / 32;
    uint code = words[0] >> shift;
    if (shift > 26) {
      code |= words[1] << (32 - shift);
    }
    return sizes[head * 64 + int(code & 63)];
  }
};

// The largest score of a row, 0 for one that sees nothing.
METAL_FUNC float component_top(const device float* tops, size_t row, int splits) {
  float top = -INFINITY;
  for (int i = 0; i < splits; i++) {
    top = metal::max(top, tops[row * splits + i]);
  }
  return top == -INFINITY ? 0.0f : top;
}

// Sums over tokens of weight times component, of one head's components: with the weights of all rows, or (OWN) with those of the head's
// own rows times the sizes of the values. A thread has a component, and 8 COLUMNS rows of weights, 32 of each in threadgroup memory.
template <bool OWN, int COLUMNS, int NSG, bool NEAR>
METAL_FUNC void component_sums(
    const device float* scores,
    const device float* tops,
    const device int* dims,
    const device int* first,
    device float* sums,
    device float* totals,
    ComponentCodes<NEAR> codes,
    ComponentSizes sizes,
    threadgroup float* weights,
    uint group,
    uint split,
    uint sg,
    uint lane) {
  constexpr int ROWS = COMPONENT_ROWS * COLUMNS;
  constexpr int EACH = (ROWS + NSG - 1) / NSG;  // rows that a SIMD-group weighs
  const int heads = dims[COMPONENT_HEADS];
  const int every = dims[COMPONENT_QUERIES] * heads;  // rows
  const int queries = OWN ? dims[COMPONENT_QUERIES] : every;
  const int blocks = (queries + ROWS - 1) / ROWS;
  const int head = int(group) / blocks;
  const int row0 = int(group) % blocks * ROWS;
  const int rows = metal::min(ROWS, queries - row0);
  const size_t row1 = size_t(OWN ? head * queries : 0) + row0;
  const int begin = first[head];
  const int size = first[head + 1] - begin;
  const int own = int(sg * 32 + lane);
  uint4 quantiser = uint4(0, 0, 0, 0);
  if (own < size) {
    quantiser = codes.quantiser(begin + own);
  }
  ComponentSpan span;
  span.load(dims, int(split));
  float top[EACH];
  float total[EACH];
  ATTEND_UNROLL
  for (int x = 0; x < EACH; x++) {
    const int r = int(sg) + x * NSG;
    top[x] = r < rows ? component_top(tops, row1 + r, dims[COMPONENT_TOPS]) : 0.0f;
    total[x] = 0;
  }
  float sum[ROWS] = {};
  for (int block = span.first; block < span.stop; block++) {
    const int place = span.place(block, int(lane));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ATTEND_UNROLL
    for (int x = 0; x < EACH; x++) {
      const int r = int(sg) + x * NSG;
      float weight = 0;
      if (r < rows && span.has(place)) {
        weight = metal::precise::exp2(scores[(row1 + r) * span.count + place] - top[x]);
        total[x] += weight;
        weight *= OWN ? sizes.at(head, heads, block, int(lane)) : 1.0f;
      }
      if (r < ROWS) {
        weights[int(lane) * ROWS + r] = weight;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (own < size) {
      ComponentStream stream;
      stream.start(codes.codes + size_t(block) * dims[COMPONENT_WORDS] + quantiser.x, int(quantiser.y));
      for (int token = 0; token < COMPONENT_TOKENS; token++) {
        const float y = codes.points[quantiser.z + stream.next()];
        ATTEND_UNROLL
        for (int r = 0; r < ROWS; r += 4) {
          const float4 four = float4(*(const threadgroup packed_float4*)(weights + token * ROWS + r));
          ATTEND_UNROLL
          for (int e = 0; e < 4; e++) {
            sum[r + e] = metal::fma(four[e], y, sum[r + e]);
          }
        }
      }
    }
  }
  if (own < size) {
    ATTEND_UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (r < rows) {
        const int at = OWN ? own : begin + own;
        const int columns = OWN ? size : dims[COMPONENT_ALL];
        sums[(size_t(split) * every + row1 + r) * columns + at] = sum[r];
      }
    }
  }
  ATTEND_UNROLL
  for (int x = 0; x < EACH; x++) {
    const int r = int(sg) + x * NSG;
    const float all = simd_sum(total[x]);
    if (r < rows && lane == 0 && (OWN || head == 0)) {
      totals[size_t(split) * every + row1 + r] = all;
    }
  }
}

}  // namespace kvtool
