// Attention of many queries: tiles of 32 queries by BK keys on 8 x 8 matrices, templated on a key reader and a value reader; and the
// row-owned form without tiles. Softmax in base 2, float32 throughout: s = log2(e) (scale (q . k) norm + bias), weights 2^(s - max).

#define PREFILL_UNROLL _Pragma("clang loop unroll(full)")

namespace kvtool {

constant constexpr float PREFILL_LOG2E = 1.44269504088896340736f;
constant constexpr float PREFILL_LN2 = 0.69314718055994530942f;
constant constexpr int PREFILL_ROWS = 32;  // queries of a tile, 8 for each of 4 SIMD-groups
constant constexpr int PREFILL_SIMDS = 4;

enum PrefillDims { PREFILL_HEADS, PREFILL_GROUP, PREFILL_QUERIES, PREFILL_KEYS, PREFILL_CAUSAL, PREFILL_WINDOW, PREFILL_START };

// ---- Readers: `eight` decodes elements d .. d + 7 of a row, d a multiple of 8

template <typename T, int D>
struct PrefillPlain {
  typedef T tile;
  const device T* data;

  METAL_FUNC void eight(size_t row, int d, threadgroup tile* to) const {
    for (int e = 0; e < 8; e++) {
      to[e] = data[row * D + d + e];
    }
  }
};

// Sign bits, lowest first, 1 for +1.
template <int D>
struct PrefillSigns {
  typedef half tile;
  const device uint8_t* bits;

  METAL_FUNC void eight(size_t row, int d, threadgroup tile* to) const {
    const uint byte = bits[row * (D / 8) + d / 8];
    for (int e = 0; e < 8; e++) {
      to[e] = (byte >> e) & 1 ? half(1) : half(-1);
    }
  }
};

// Two 4-bit indices a byte, low nibble first, clamped to the table.
template <int D>
struct PrefillNibbles {
  typedef float tile;
  const device uint8_t* codes;
  const device float* table;
  int last;

  METAL_FUNC void eight(size_t row, int d, threadgroup tile* to) const {
    for (int e = 0; e < 8; e += 2) {
      const int byte = codes[row * (D / 2) + (d + e) / 2];
      to[e] = table[metal::min(byte & 15, last)];
      to[e + 1] = table[metal::min(byte >> 4, last)];
    }
  }
};

// ---- Which keys a query sees

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

// ---- 8 x 8 fragments: lane l has elements (row, column) and (row, column + 1)

typedef metal::simdgroup_matrix<float, 8, 8> PrefillMatrix;

METAL_FUNC int prefill_fragment_row(uint lane) {
  return int((lane / 4 & 4) + lane / 2 % 4);
}

METAL_FUNC int prefill_fragment_column(uint lane) {
  return int((lane / 4 & 2) * 2 + lane % 2 * 2);
}

// The lane that holds column c of this lane's row.
METAL_FUNC ushort prefill_fragment_lane(uint lane, int c) {
  return ushort((lane & ~9u) | (c / 2 & 1) | (c / 2 & 2) << 2);
}

METAL_FUNC float prefill_row_max(float x) {
  x = metal::max(x, simd_shuffle_xor(x, ushort(1)));
  return metal::max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float prefill_row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

// Rows base .. base + BK - 1 of a head into a tile, zeros beyond the last; true for a lane that met a value that is not finite.
template <int D, int BK, int LD, typename Reader>
METAL_FUNC bool prefill_load(Reader reader, size_t head_row, int base, int keys, threadgroup typename Reader::tile* to, uint thread_index) {
  bool odd = false;
  for (int c = int(thread_index); c < BK * D / 8; c += 32 * PREFILL_SIMDS) {
    const int j = c / (D / 8), d = c % (D / 8) * 8;
    threadgroup typename Reader::tile* place = to + j * LD + d;
    if (base + j < keys) {
      reader.eight(head_row + base + j, d, place);
      for (int e = 0; e < 8; e++) {
        odd = odd || !metal::isfinite(float(place[e]));
      }
    } else {
      for (int e = 0; e < 8; e++) {
        place[e] = typename Reader::tile(0.0f);
      }
    }
  }
  return odd;
}

// One tile. k_tile, v_tile: BK rows of D + 8; odd: a flag for each SIMD-group.
template <int D, int BK, bool NORM, bool BIAS, bool VSCALE, typename Keys, typename Values, typename Q, typename N, typename C, typename S, typename O>
METAL_FUNC void prefill(
    const device Q* q,
    const device float* scale,
    const device int* dims,
    const device int* start,
    const device N* k_norm,
    const device C* k_bias,
    const device S* v_scale,
    device O* out,
    device float* lse,
    Keys keys,
    Values values,
    threadgroup typename Keys::tile* k_tile,
    threadgroup typename Values::tile* v_tile,
    threadgroup int* odd,
    uint tile,
    uint head,
    uint sg,
    uint lane) {
  constexpr int LD = D + 8;
  const int queries = dims[PREFILL_QUERIES], length = dims[PREFILL_KEYS], heads = dims[PREFILL_HEADS];
  const int batch = int(head) / heads;
  const int kv_head = batch * (heads / dims[PREFILL_GROUP]) + int(head) % heads / dims[PREFILL_GROUP];
  const size_t head_row = size_t(kv_head) * length;

  // What the whole tile sees (any, all), from a row per lane; then this lane's own row.
  const int tile_row = int(tile) * PREFILL_ROWS + int(lane);
  const PrefillRange row = prefill_range(dims, start, batch, tile_row);
  const int first = simd_min(row.low < row.high ? row.low : INT_MAX), end = simd_max(row.high);
  const int full_from = simd_max(row.low), full_to = simd_min(tile_row < queries ? row.high : INT_MAX);
  const int i = int(tile) * PREFILL_ROWS + int(sg) * 8 + prefill_fragment_row(lane);
  const int column = prefill_fragment_column(lane);
  const PrefillRange mine = prefill_range(dims, start, batch, i);

  PrefillMatrix query[D / 8], sum[D / 8];
  const size_t q_row = (size_t(head) * queries + metal::min(i, queries - 1)) * D;
  PREFILL_UNROLL
  for (int f = 0; f < D / 8; f++) {
    for (int e = 0; e < 2; e++) {
      query[f].thread_elements()[e] = float(q[q_row + f * 8 + column + e]) * (scale[0] * PREFILL_LOG2E);
      sum[f].thread_elements()[e] = 0;
    }
  }
  float top = -INFINITY, total = 0;

  for (int base = first; base < end; base += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    prefill_load<D, BK, LD>(keys, head_row, base, length, k_tile, sg * 32 + lane);
    const bool odd_values = prefill_load<D, BK, LD>(values, head_row, base, length, v_tile, sg * 32 + lane);
    const bool any_odd = simd_any(odd_values);
    if (lane == 0) {
      odd[sg] = any_odd;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    PrefillMatrix s[BK / 8];
    float largest = top;
    PREFILL_UNROLL
    for (int n = 0; n < BK / 8; n++) {
      s[n] = PrefillMatrix(0.0f);
      PREFILL_UNROLL
      for (int f = 0; f < D / 8; f++) {
        PrefillMatrix k;
        for (int e = 0; e < 2; e++) {
          k.thread_elements()[e] = float(k_tile[(n * 8 + column + e) * LD + f * 8 + prefill_fragment_row(lane)]);
        }
        simdgroup_multiply_accumulate(s[n], query[f], k, s[n]);
      }
      for (int e = 0; e < 2; e++) {
        const int j = base + n * 8 + column + e;
        float x = s[n].thread_elements()[e];
        if (NORM || BIAS) {
          const size_t token = head_row + metal::min(j, length - 1);
          x = (NORM ? x * float(k_norm[token]) : x) + (BIAS ? float(k_bias[token]) * PREFILL_LOG2E : 0.0f);
        }
        x = mine.low <= j && j < mine.high ? x : -INFINITY;
        s[n].thread_elements()[e] = x;
        largest = metal::max(largest, x);
      }
    }

    largest = prefill_row_max(largest);
    const float keep = prefill_weight(top, largest);
    top = largest;
    float added = 0;
    PREFILL_UNROLL
    for (int n = 0; n < BK / 8; n++) {
      for (int e = 0; e < 2; e++) {
        const float p = prefill_weight(s[n].thread_elements()[e], top);
        added += p;
        const int j = base + n * 8 + column + e;
        s[n].thread_elements()[e] = VSCALE && mine.low <= j && j < mine.high ? p * float(v_scale[head_row + j]) : p;
      }
    }
    total = total * keep + prefill_row_sum(added);
    PREFILL_UNROLL
    for (int f = 0; f < D / 8; f++) {
      for (int e = 0; e < 2; e++) {
        sum[f].thread_elements()[e] *= keep;
      }
    }

    const bool whole = full_from <= base && base + BK <= full_to;
    if (whole || !(odd[0] | odd[1] | odd[2] | odd[3])) {
      PREFILL_UNROLL
      for (int f = 0; f < D / 8; f++) {
        PREFILL_UNROLL
        for (int n = 0; n < BK / 8; n++) {
          PrefillMatrix v;
          for (int e = 0; e < 2; e++) {
            v.thread_elements()[e] = float(v_tile[(n * 8 + prefill_fragment_row(lane)) * LD + f * 8 + column + e]);
          }
          simdgroup_multiply_accumulate(sum[f], s[n], v, sum[f]);
        }
      }
      continue;
    }
    // A value that is not finite: a weight of zero would not keep it from the rows that do not see it.
    for (int n = 0; n < BK / 8; n++) {
      for (int c = 0; c < 8; c++) {
        const float p = simd_shuffle(s[n].thread_elements()[c & 1], prefill_fragment_lane(lane, c));
        const int j = base + n * 8 + c;
        for (int f = 0; mine.low <= j && j < mine.high && f < D / 8; f++) {
          for (int e = 0; e < 2; e++) {
            sum[f].thread_elements()[e] += p * float(v_tile[(n * 8 + c) * LD + f * 8 + column + e]);
          }
        }
      }
    }
  }

  if (i >= queries) {
    return;
  }
  const size_t out_row = size_t(head) * queries + i;
  if (column == 0) {
    lse[out_row] = total == 0 ? -INFINITY : (top + metal::precise::log2(total)) * PREFILL_LN2;
  }
  PREFILL_UNROLL
  for (int f = 0; f < D / 8; f++) {
    for (int e = 0; e < 2; e++) {
      out[out_row * D + f * 8 + column + e] = O(total == 0 ? 0.0f : sum[f].thread_elements()[e] / total);
    }
  }
}

// Row-owned form: one SIMD-group has ROWS queries to itself, KEYS keys stream by at a time; no threadgroup memory, no barrier.
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
