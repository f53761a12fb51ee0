// Attention of many queries, the row-owned form: one SIMD-group has ROWS queries to itself, KEYS keys stream by at a time; no threadgroup
// memory, no barrier. Softmax in base 2, float32 throughout: s = log2(e) scale (q . k) norm, weights 2^(s - max).

#define PREFILL_UNROLL _Pragma("clang loop unroll(full)")

namespace kvtool {

constant constexpr float PREFILL_LOG2E = 1.44269504088896340736f;
constant constexpr float PREFILL_LN2 = 0.69314718055994530942f;

enum PrefillDims { PREFILL_HEADS, PREFILL_GROUP, PREFILL_QUERIES, PREFILL_KEYS, PREFILL_CAUSAL, PREFILL_WINDOW, PREFILL_START };

struct PrefillRange {
  int low;
  int high;
};

// Keys [low, high) of query i; (0, 0) for none, and for rows beyond the last.
METAL_FUNC PrefillRange prefill_range(const device int* dims, const device int* start, int batch, int i) {
  const int queries = dims[PREFILL_QUERIES];
  if (i >= queries) {
    return {0, 0};
  }
  const int at = dims[PREFILL_KEYS] - queries + i;
  const int high = dims[PREFILL_CAUSAL] ? at + 1 : dims[PREFILL_KEYS];
  int low = dims[PREFILL_WINDOW] ? metal::max(at - dims[PREFILL_WINDOW] + 1, 0) : 0;
  if (dims[PREFILL_START]) {
    low = metal::max(low, start[size_t(batch) * queries + i]);
  }
  return low < high ? PrefillRange{low, high} : PrefillRange{0, 0};
}

// 2^(s - top), 0 for s = -inf even where the whole row is -inf: never -inf + inf.
METAL_FUNC float prefill_weight(float s, float top) {
  return metal::precise::exp2(s - (top == -INFINITY ? 0.0f : top));
}

template <int D, int KEYS, int ROWS, bool NORM, bool VSCALE, typename KT, typename VT, typename Q, typename N, typename S, typename O>
METAL_FUNC void prefill_stream(
    const device Q* q,
    const device KT* k,
    const device VT* v,
    const device float* scale,
    const device int* dims,
    const device int* start,
    const device N* k_norm,
    const device S* v_scale,
    device O* out,
    device float* lse,
    uint block,
    uint head,
    uint lane) {
  constexpr int E = D / 32;
  const int queries = dims[PREFILL_QUERIES], length = dims[PREFILL_KEYS], heads = dims[PREFILL_HEADS];
  const int batch = int(head) / heads;
  const int kv_head = batch * (heads / dims[PREFILL_GROUP]) + int(head) % heads / dims[PREFILL_GROUP];
  const size_t head_row = size_t(kv_head) * length;
  const int d = int(lane) * E;

  float query[ROWS][E], sum[ROWS][E], top[ROWS], total[ROWS];
  PrefillRange range[ROWS];
  int first = length, end = 0;
  PREFILL_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int i = int(block) * ROWS + r;
    range[r] = prefill_range(dims, start, batch, i);
    if (range[r].low < range[r].high) {
      first = metal::min(first, range[r].low);
      end = metal::max(end, range[r].high);
    }
    top[r] = -INFINITY;
    total[r] = 0;
    for (int e = 0; e < E; e++) {
      query[r][e] = float(q[(size_t(head) * queries + metal::min(i, queries - 1)) * D + d + e]) * (scale[0] * PREFILL_LOG2E);
      sum[r][e] = 0;
    }
  }

  for (int base = first; base < end; base += KEYS) {
    float s[ROWS][KEYS];
    PREFILL_UNROLL
    for (int c = 0; c < KEYS; c++) {
      const size_t token = head_row + metal::min(base + c, length - 1);
      const float norm = NORM ? float(k_norm[token]) : 1.0f;
      float key[E];
      for (int e = 0; e < E; e++) {
        key[e] = float(k[token * D + d + e]);
      }
      PREFILL_UNROLL
      for (int r = 0; r < ROWS; r++) {
        float dot = 0;
        for (int e = 0; e < E; e++) {
          dot += query[r][e] * key[e];
        }
        s[r][c] = simd_sum(dot) * norm;
      }
    }
    PREFILL_UNROLL
    for (int r = 0; r < ROWS; r++) {
      float largest = top[r];
      PREFILL_UNROLL
      for (int c = 0; c < KEYS; c++) {
        s[r][c] = range[r].low <= base + c && base + c < range[r].high ? s[r][c] : -INFINITY;
        largest = metal::max(largest, s[r][c]);
      }
      const float keep = prefill_weight(top[r], largest);
      top[r] = largest;
      total[r] *= keep;
      for (int e = 0; e < E; e++) {
        sum[r][e] *= keep;
      }
      PREFILL_UNROLL
      for (int c = 0; c < KEYS; c++) {
        s[r][c] = prefill_weight(s[r][c], largest);
        total[r] += s[r][c];
      }
    }
    PREFILL_UNROLL
    for (int c = 0; c < KEYS; c++) {
      const int j = base + c;
      const size_t token = head_row + metal::min(j, length - 1);
      const float factor = VSCALE ? float(v_scale[token]) : 1.0f;
      float value[E];
      for (int e = 0; e < E; e++) {
        value[e] = float(v[token * D + d + e]);
      }
      PREFILL_UNROLL
      for (int r = 0; r < ROWS; r++) {
        // Not by a weight of zero: a value that a row does not see may be NaN.
        for (int e = 0; range[r].low <= j && j < range[r].high && e < E; e++) {
          sum[r][e] += s[r][c] * factor * value[e];
        }
      }
    }
  }

  PREFILL_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int i = int(block) * ROWS + r;
    if (i < queries) {
      const size_t out_row = size_t(head) * queries + i;
      if (lane == 0) {
        lse[out_row] = total[r] == 0 ? -INFINITY : (top[r] + metal::precise::log2(total[r])) * PREFILL_LN2;
      }
      for (int e = 0; e < E; e++) {
        out[out_row * D + d + e] = O(total[r] == 0 ? 0.0f : sum[r][e] / total[r]);
      }
    }
  }
}

}  // namespace kvtool
