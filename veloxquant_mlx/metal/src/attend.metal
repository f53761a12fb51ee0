// Flash-decoding over coded keys and values: one online softmax, templated on a key reader and a value reader.
//
// A threadgroup owns RB query rows of one KV head (the heads of a group, so that a loaded byte serves all of them) and one split of the
// keys they see. Its NSG SIMD-groups take consecutive runs of that split; within a SIMD-group LANES lanes share a key, each with E of its
// D elements, so that 32 / LANES keys are scored at once. A lane scores TILE keys before it rescales its sums, at most once for all of
// them. Partial (m, l, o) merge by log-sum-exp: lanes by shuffles, SIMD-groups through `pool`, splits in attend_finish. A softmax weight
// is 2^(s - m): scores carry a factor log2(e).

#define ATTEND_UNROLL _Pragma("clang loop unroll(full)")

namespace kvtool {

constant constexpr float ATTEND_LOG2E = 1.44269504088896340736f;
constant constexpr float ATTEND_LN2 = 0.69314718055994530942f;

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

// Factor that brings a state with maximum m to the maximum `top`; 0 where nothing was seen (never exp2(-inf + inf)).
METAL_FUNC float attend_factor(float m, float top) {
  return m == -INFINITY ? 0.0f : metal::precise::exp2(m - top);
}

// Of an 8 x 8 matrix lane l has elements (row, column) and (row, column + 1), as in MLX's steel/attn/mma.h.
METAL_FUNC int matrix_row(uint lane) {
  return int((lane / 4 & 4) + lane / 2 % 4);
}

METAL_FUNC int matrix_column(uint lane) {
  return int((lane / 4 & 2) * 2 + lane % 2 * 2);
}

// A table in threadgroup memory (NEAR) or not: its pointer, four entries at once.
template <bool NEAR>
struct Table {
  typedef const device float* pointer;

  static METAL_FUNC float4 four(pointer from) {
    return float4(*(const device packed_float4*)from);
  }
};

template <>
struct Table<true> {
  typedef const threadgroup float* pointer;

  static METAL_FUNC float4 four(pointer from) {
    return float4(*(const threadgroup packed_float4*)from);
  }
};

// The running softmax of one query row in one lane.
template <int E>
struct AttendState {
  float m;     // largest score so far, in log2
  float l;     // sum of weights
  float o[E];  // weighted sum of values

  METAL_FUNC void clear() {
    m = -INFINITY;
    l = 0;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      o[e] = 0;
    }
  }

  METAL_FUNC void scale(float factor) {
    l *= factor;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      o[e] *= factor;
    }
  }

  // Before scores up to `top` are added.
  METAL_FUNC void raise(float top) {
    if (top > m) {
      scale(attend_factor(m, top));
      m = top;
    }
  }

  // Add one value of weight 2^s, s at most m; a score of -inf adds nothing, a NaN makes the row NaN.
  METAL_FUNC void add(float s, float factor, const thread float* v) {
    if (s == -INFINITY) {
      return;
    }
    const float p = metal::precise::exp2(s - m);
    l += p;
    const float w = p * factor;
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      o[e] = metal::fma(w, v[e], o[e]);
    }
  }
};

// Keys [low, high) that a query row sees. row counts heads of the group fastest; rows beyond the last see nothing.
METAL_FUNC void attend_range(const device int* dims, const device int* start, int batch, int row, thread int& low, thread int& high) {
  low = 0;
  high = 0;
  const int i = row / dims[ATTEND_GROUP];
  if (i >= dims[ATTEND_QUERIES]) {
    return;
  }
  const int at = dims[ATTEND_KEYS] - dims[ATTEND_QUERIES] + i;
  const int end = dims[ATTEND_CAUSAL] ? at + 1 : dims[ATTEND_KEYS];
  int first = dims[ATTEND_WINDOW] ? metal::max(at - dims[ATTEND_WINDOW] + 1, 0) : 0;
  if (dims[ATTEND_START]) {
    first = metal::max(first, start[batch * dims[ATTEND_QUERIES] + i]);
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
METAL_FUNC void attend(
    const device Q* q,
    const device float* q_scale,
    const device int* dims,
    const device int* start,
    const device N* k_norm,
    const device C* k_bias,
    const device S* v_scale,
    device O* out,
    device float* lse,
    Keys keys,
    Values values,
    threadgroup float* pool,
    uint group,
    uint split,
    uint sg,
    uint lane) {
  constexpr int TOGETHER = 32 / LANES;
  constexpr int TILE = RB > 4 ? 2 : 4;  // as many scores a row stay in registers
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
      first = metal::min(first, low[x]);
      end = metal::max(end, high[x]);
    }
  }

  const int seen = metal::max(end - first, 0);
  const int per_split = (seen + splits - 1) / splits;
  const int before = metal::min(int(split) * per_split, seen);
  const int begin = first + before;
  const int stop = begin + metal::min(per_split, seen - before);
  const int run = (stop - begin + NSG * TOGETHER - 1) / (NSG * TOGETHER) * TOGETHER;
  const int mine = begin + int(sg) * run;
  const int last = metal::min(mine + run, stop);
  for (int base = mine; base < last; base += TILE * TOGETHER) {
    float scores[TILE][RB];
    ATTEND_UNROLL
    for (int t = 0; t < TILE; t++) {
      const int at = base + t * TOGETHER + slot;
      const int j = metal::min(at, last - 1);
      const size_t token = size_t(head) * dims[ATTEND_KEYS] + j;
      typename Keys::Key key;
      keys.load(key, head, j, d0);
      const float norm = NORM ? float(k_norm[token]) : 1.0f;
      const float bias = BIAS ? float(k_bias[token]) * ATTEND_LOG2E : 0.0f;
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        float s = query[x].dot(key);
        ATTEND_UNROLL
        for (int offset = LANES / 2; offset > 0; offset /= 2) {
          s += simd_shuffle_xor(s, ushort(offset));
        }
        scores[t][x] = at < last && low[x] <= j && j < high[x] ? s * factor[x] * norm + bias : -INFINITY;
      }
    }
    ATTEND_UNROLL
    for (int x = 0; x < RB; x++) {
      float top = state[x].m;
      ATTEND_UNROLL
      for (int t = 0; t < TILE; t++) {
        top = scores[t][x] > top ? scores[t][x] : top;  // a NaN is no maximum
      }
      state[x].raise(top);
    }
    ATTEND_UNROLL
    for (int t = 0; t < TILE; t++) {
      const int j = metal::min(base + t * TOGETHER + slot, last - 1);
      float v[E];
      values.load(v, head, j, d0);
      const float scale = VSCALE ? float(v_scale[size_t(head) * dims[ATTEND_KEYS] + j]) : 1.0f;
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        state[x].add(scores[t][x], scale, v);
      }
    }
  }

  // The keys that were scored at once.
  ATTEND_UNROLL
  for (int offset = LANES; offset < 32; offset *= 2) {
    ATTEND_UNROLL
    for (int x = 0; x < RB; x++) {
      const float m = simd_shuffle_xor(state[x].m, ushort(offset));
      const float top = metal::max(m, state[x].m);
      state[x].scale(attend_factor(state[x].m, top));  // the other lane does the same, before l and o travel
      state[x].l += simd_shuffle_xor(state[x].l, ushort(offset));
      ATTEND_UNROLL
      for (int e = 0; e < E; e++) {
        state[x].o[e] += simd_shuffle_xor(state[x].o[e], ushort(offset));
      }
      state[x].m = top;
    }
  }

  // The SIMD-groups: the upper half hands over to the lower one until one is left.
  constexpr int STRIDE = LANES * E + 2;
  for (int active = NSG; active > 1; active = (active + 1) / 2) {
    const int keep = (active + 1) / 2;
    if (int(sg) >= keep && int(sg) < active && slot == 0) {
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        threadgroup float* place = pool + ((int(sg) - keep) * RB + x) * STRIDE;
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
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(sg) < active - keep && slot == 0) {
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        const threadgroup float* place = pool + (int(sg) * RB + x) * STRIDE;
        const float m = place[0];
        const float top = metal::max(m, state[x].m);
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
    threadgroup_barrier(mem_flags::mem_threadgroup);
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
      lse[index] = none ? -INFINITY : state[x].m * ATTEND_LN2 + metal::precise::log(state[x].l);
    }
    ATTEND_UNROLL
    for (int e = 0; e < E; e++) {
      if (d0 + e < D) {
        out[index * D + d0 + e] = O(none ? 0.0f : state[x].o[e] / state[x].l);
      }
    }
  }
}

// Second pass, one threadgroup of D threads a query row: merge the splits, then multiply by R from the right. dims: splits, rotate.
template <int D, typename O>
METAL_FUNC void attend_finish(
    const device float* parts,
    const device float* part_lse,
    const device float* rotation,
    const device int* dims,
    device O* out,
    device float* lse,
    threadgroup float* merged,
    uint row,
    uint d) {
  const int splits = dims[0];
  part_lse += size_t(row) * splits;
  parts += size_t(row) * splits * D;
  float top = -INFINITY;
  for (int i = 0; i < splits; i++) {
    top = metal::max(top, part_lse[i]);
  }
  float total = 0;
  float sum = 0;
  for (int i = 0; i < splits; i++) {
    // A split with -inf saw nothing; one with NaN has to reach the sum.
    const float weight = part_lse[i] == -INFINITY ? 0.0f : metal::precise::exp((part_lse[i] - (top == -INFINITY ? 0.0f : top)));
    total += weight;
    sum = metal::fma(weight, parts[size_t(i) * D + d], sum);
  }
  float value = total == 0 ? 0.0f : sum / total;
  if (d == 0) {
    lse[row] = total == 0 ? -INFINITY : top + metal::precise::log(total);
  }
  if (dims[1]) {
    merged[d] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    value = 0;
    for (int i = 0; i < D; i++) {
      value = metal::fma(merged[i], rotation[size_t(i) * D + d], value);
    }
  }
  out[size_t(row) * D + d] = O(value);
}

}  // namespace kvtool
