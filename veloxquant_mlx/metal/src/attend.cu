// Flash-decoding over coded keys and values: one online softmax, templated on a key reader and a value reader.
//
// A block owns RB query rows of one KV head (the heads of a group, so that a loaded byte serves all of them) and one split of the
// keys they see. Its NSG warps take consecutive runs of that split; within a warp LANES lanes share a key, each with E of its
// D elements, so that 32 / LANES keys are scored at once. Partial (m, l, o) merge by log-sum-exp: lanes by shuffles, warps through
// `pool`, splits in attend_finish. A softmax weight is 2^(s - m): scores carry a factor log2(e).

#define ATTEND_UNROLL _Pragma("unroll")
#define ATTEND_INF __int_as_float(0x7f800000)

namespace kvtool {

constexpr float ATTEND_LOG2E = 1.44269504088896340736f;
constexpr float ATTEND_LN2 = 0.69314718055994530942f;
constexpr int ATTEND_MAX_SPLITS = 512;

// Where the sizes stand in `dims`; a reader's own sizes follow.
enum AttendDims {
  ATTEND_HEADS,    // H_kv
  ATTEND_GROUP,    // query heads per KV head
  ATTEND_QUERIES,  // S_q
  ATTEND_KEYS,     // S_kv
  ATTEND_SPLITS,
  ATTEND_CAUSAL,
  ATTEND_WINDOW,   // 0 for none
  ATTEND_START,    // whether `start` is given
  ATTEND_PER_ROW,  // whether q_scale has one entry per query
};

// The running softmax of one query row in one lane.
template <int E>
struct AttendState {
  float m;     // largest score so far, in log2
  float l;     // sum of weights
  float o[E];  // weighted sum of values

  __device__ __forceinline__ void clear() {
    m = -ATTEND_INF;
    l = 0;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      o[e] = 0;
    }
  }

  __device__ __forceinline__ void scale(float factor) {
    l *= factor;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      o[e] *= factor;
    }
  }

  // Add one value of weight 2^s; a score of -inf adds nothing, a NaN makes the row NaN.
  __device__ __forceinline__ void add(float s, float factor, const float* v) {
    if (s == -ATTEND_INF) {
      return;
    }
    if (s > m) {
      scale(exp2f(m - s));
      m = s;
    }
    const float p = exp2f(s - m);
    l += p;
    const float w = p * factor;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      o[e] = fmaf(w, v[e], o[e]);
    }
  }
};

// Factor that brings a state with maximum m to the maximum `top`; 0 where nothing was seen (never exp2(-inf + inf)).
__device__ __forceinline__ float attend_factor(float m, float top) {
  return m == -ATTEND_INF ? 0.0f : exp2f(m - top);
}

// Keys [low, high) that a query row sees. row counts heads of the group fastest; rows beyond the last see nothing.
__device__ __forceinline__ void attend_range(const int* dims, const int* start, int batch, int row, int& low, int& high) {
  low = 0;
  high = 0;
  const int i = row / dims[ATTEND_GROUP];
  if (i >= dims[ATTEND_QUERIES]) {
    return;
  }
  const int at = dims[ATTEND_KEYS] - dims[ATTEND_QUERIES] + i;
  const int end = dims[ATTEND_CAUSAL] ? at + 1 : dims[ATTEND_KEYS];
  int first = dims[ATTEND_WINDOW] ? max(at - dims[ATTEND_WINDOW] + 1, 0) : 0;
  if (dims[ATTEND_START]) {
    first = max(first, start[batch * dims[ATTEND_QUERIES] + i]);
  }
  if (first < end) {
    low = first;
    high = end;
  }
}

// pool: (NSG / 2) * RB * (LANES * E + 2) floats, at least one.
template <
    typename Keys, typename Values, int D, int E, int LANES, int RB, int NSG, bool NORM, bool BIAS, bool VSCALE,
    typename Q, typename N, typename C, typename S, typename O>
__device__ __forceinline__ void attend(
    const Q* q,
    const float* q_scale,
    const int* dims,
    const int* start,
    const N* k_norm,
    const C* k_bias,
    const S* v_scale,
    O* out,
    float* lse,
    Keys keys,
    Values values,
    float* pool,
    uint32_t group,
    uint32_t split,
    uint32_t sg,
    uint32_t lane) {
  constexpr int TOGETHER = 32 / LANES;
  const int kv_heads = dims[ATTEND_HEADS];
  const int heads = dims[ATTEND_GROUP];
  const int queries = dims[ATTEND_QUERIES];
  const int splits = dims[ATTEND_SPLITS];
  const int blocks = (heads * queries + RB - 1) / RB;
  const int block = int(group) % blocks;
  const int head = int(group) / blocks;  // of batch * H_kv
  const int slot = int(lane) / LANES;
  const int d0 = int(lane) % LANES * E;

  typename Keys::Query query[RB];
  AttendState<E> state[RB];
  float factor[RB];
  int low[RB];
  int high[RB];
  int first = dims[ATTEND_KEYS];
  int end = 0;
  ATTEND_UNROLL
  for (int x = 0; x < RB; x++) {
    const int row = block * RB + x;
    attend_range(dims, start, head / kv_heads, row, low[x], high[x]);
    state[x].clear();
    // A row that sees nothing still loads some query: row 0 of its head.
    const bool real = row < heads * queries;
    const size_t index = size_t(head) * heads * queries + (real ? (row % heads) * queries + row / heads : 0);
    query[x].load(q + index * D, d0);
    factor[x] = q_scale[dims[ATTEND_PER_ROW] ? index : 0] * ATTEND_LOG2E;
    if (low[x] < high[x]) {
      first = min(first, low[x]);
      end = max(end, high[x]);
    }
  }

  const int seen = max(end - first, 0);
  const int per_split = (seen + splits - 1) / splits;
  const int before = min(int(split) * per_split, seen);
  const int begin = first + before;
  const int stop = begin + min(per_split, seen - before);
  const int run = (stop - begin + NSG * TOGETHER - 1) / (NSG * TOGETHER) * TOGETHER;
  const int mine = begin + int(sg) * run;
  const int last = min(mine + run, stop);
  for (int base = mine; base < last; base += TOGETHER) {
    const bool in = base + slot < last;
    const int j = in ? base + slot : last - 1;
    const size_t token = size_t(head) * dims[ATTEND_KEYS] + j;
    typename Keys::Key key;
    keys.load(key, head, j, d0);
    float v[E];
    values.load(v, head, j, d0);
    const float norm = NORM ? float(k_norm[token]) : 1.0f;
    const float bias = BIAS ? float(k_bias[token]) * ATTEND_LOG2E : 0.0f;
    const float scale = VSCALE ? float(v_scale[token]) : 1.0f;
    ATTEND_UNROLL
    for (int x = 0; x < RB; x++) {
      float s = query[x].dot(key);
      ATTEND_UNROLL
      for (int offset = LANES / 2; offset > 0; offset /= 2) {
        s += __shfl_xor_sync(0xffffffffu, s, offset);
      }
      if (in && low[x] <= j && j < high[x]) {
        state[x].add(s * factor[x] * norm + bias, scale, v);
      }
    }
  }

  // The keys that were scored at once.
  ATTEND_UNROLL
  for (int offset = LANES; offset < 32; offset *= 2) {
    ATTEND_UNROLL
    for (int x = 0; x < RB; x++) {
      const float m = __shfl_xor_sync(0xffffffffu, state[x].m, offset);
      const float top = max(m, state[x].m);
      state[x].scale(attend_factor(state[x].m, top));  // the other lane does the same, before l and o travel
      state[x].l += __shfl_xor_sync(0xffffffffu, state[x].l, offset);
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        state[x].o[e] += __shfl_xor_sync(0xffffffffu, state[x].o[e], offset);
      }
      state[x].m = top;
    }
  }

  // The warps: the upper half hands over to the lower one until one is left.
  constexpr int STRIDE = LANES * E + 2;
  for (int active = NSG; active > 1; active = (active + 1) / 2) {
    const int keep = (active + 1) / 2;
    if (int(sg) >= keep && int(sg) < active && slot == 0) {
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        float* place = pool + ((int(sg) - keep) * RB + x) * STRIDE;
        if (lane == 0) {
          place[0] = state[x].m;
          place[1] = state[x].l;
        }
        ATTEND_UNROLL
        for (int e = 0; e < E; e++) {
          place[2 + e * LANES + int(lane)] = state[x].o[e];
        }
      }
    }
    __syncthreads();
    if (int(sg) < active - keep && slot == 0) {
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        const float* place = pool + (int(sg) * RB + x) * STRIDE;
        const float m = place[0];
        const float top = max(m, state[x].m);
        const float theirs = attend_factor(m, top);
        state[x].scale(attend_factor(state[x].m, top));
        state[x].l += theirs * place[1];
        ATTEND_UNROLL
        for (int e = 0; e < E; e++) {
          state[x].o[e] += theirs * place[2 + e * LANES + int(lane)];
        }
        state[x].m = top;
      }
    }
    __syncthreads();
  }

  if (sg != 0 || slot != 0) {
    return;
  }
  ATTEND_UNROLL
  for (int x = 0; x < RB; x++) {
    const int row = block * RB + x;
    if (row >= heads * queries) {
      return;
    }
    const size_t index = (size_t(head) * heads * queries + (row % heads) * queries + row / heads) * splits + split;
    const bool none = state[x].l == 0;
    if (lane == 0) {
      lse[index] = none ? -ATTEND_INF : state[x].m * ATTEND_LN2 + logf(state[x].l);
    }
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      if (d0 + e < D) {
        out[index * D + d0 + e] = O(none ? 0.0f : state[x].o[e] / state[x].l);
      }
    }
  }
}

// Second pass, one block of D threads a query row: merge the splits, then multiply by R from the right. dims: splits, rotate.
template <int D, typename O>
__device__ __forceinline__ void attend_finish(
    const float* parts,
    const float* part_lse,
    const float* rotation,
    const int* dims,
    O* out,
    float* lse,
    float* merged,
    float* weights,  // ATTEND_MAX_SPLITS
    uint32_t row,
    uint32_t d) {
  constexpr int EARLY = 32;  // parts that are read before their weights are known
  const int splits = dims[0];
  part_lse += size_t(row) * splits;
  parts += size_t(row) * splits * D + d;
  float part[EARLY];
  ATTEND_UNROLL
  for (int i = 0; i < EARLY; i++) {
    part[i] = i < splits ? parts[size_t(i) * D] : 0.0f;
  }
  for (int i = int(d); i < splits; i += D) {
    weights[i] = part_lse[i];
  }
  __syncthreads();
  float top = -ATTEND_INF;
  for (int i = 0; i < splits; i++) {
    top = max(top, weights[i]);
  }
  __syncthreads();
  for (int i = int(d); i < splits; i += D) {
    // A split with -inf saw nothing; one with NaN has to reach the sum.
    weights[i] = weights[i] == -ATTEND_INF ? 0.0f : expf((weights[i] - (top == -ATTEND_INF ? 0.0f : top)));
  }
  __syncthreads();
  float total = 0;
  float sum = 0;
  ATTEND_UNROLL
  for (int i = 0; i < EARLY; i++) {
    if (i < splits) {
      total += weights[i];
      sum = fmaf(weights[i], part[i], sum);
    }
  }
  _Pragma("unroll 8")
  for (int i = EARLY; i < splits; i++) {
    total += weights[i];
    sum = fmaf(weights[i], parts[size_t(i) * D], sum);
  }
  float value = total == 0 ? 0.0f : sum / total;
  if (d == 0) {
    lse[row] = total == 0 ? -ATTEND_INF : top + logf(total);
  }
  if (dims[1]) {
    merged[d] = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < D; i++) {
      value = fmaf(merged[i], rotation[size_t(i) * D + d], value);
    }
  }
  out[size_t(row) * D + d] = O(value);
}

}  // namespace kvtool
