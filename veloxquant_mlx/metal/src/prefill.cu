// Attention of many queries: tiles of 32 queries by 32 keys, templated on a key reader and a value reader; and the row-owned form
// without tiles. Softmax in base 2, float32 throughout: s = log2(e) (scale (q . k) norm + bias), weights 2^(s - max).

#define PREFILL_ALL 0xffffffffu
#define PREFILL_INF __int_as_float(0x7f800000)
#define PREFILL_LOG2E 1.44269504088896340736f
#define PREFILL_LN2 0.69314718055994530942f
#define PREFILL_ROWS 32  // queries of a tile
#define PREFILL_OWN 8    // of a warp
#define PREFILL_BK 32    // keys of a tile: one for each lane
#define PREFILL_THREADS 128

namespace kvtool {

enum PrefillDims { PREFILL_HEADS, PREFILL_GROUP, PREFILL_QUERIES, PREFILL_KEYS, PREFILL_CAUSAL, PREFILL_WINDOW, PREFILL_START };

// ---- Readers: `eight` decodes elements d .. d + 7 of a row, d a multiple of 8

template <typename T, int D>
struct PrefillPlain {
  const T* data;

  __device__ inline void eight(size_t row, int d, float* to) const {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      to[e] = (float)data[row * D + d + e];
    }
  }
};

// Sign bits, lowest first, 1 for +1.
template <int D>
struct PrefillSigns {
  const uint8_t* bits;

  __device__ inline void eight(size_t row, int d, float* to) const {
    const unsigned int byte = bits[row * (D / 8) + d / 8];
#pragma unroll
    for (int e = 0; e < 8; e++) {
      to[e] = (byte >> e) & 1 ? 1.0f : -1.0f;
    }
  }
};

// Two 4-bit indices a byte, low nibble first, clamped to the table.
template <int D>
struct PrefillNibbles {
  const uint8_t* codes;
  const float* table;
  int last;

  __device__ inline void eight(size_t row, int d, float* to) const {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const int byte = codes[row * (D / 2) + (d + e) / 2];
      to[e] = table[min(byte & 15, last)];
      to[e + 1] = table[min(byte >> 4, last)];
    }
  }
};

// ---- Which keys a query sees

struct PrefillRange {
  int low;
  int high;
};

// Keys [low, high) of query i; (0, 0) for none, and for rows beyond the last.
__device__ inline PrefillRange prefill_range(const int* dims, const int* start, int batch, int i) {
  const int queries = dims[PREFILL_QUERIES];
  if (i >= queries) {
    return {0, 0};
  }
  const int at = dims[PREFILL_KEYS] - queries + i;
  const int high = dims[PREFILL_CAUSAL] ? at + 1 : dims[PREFILL_KEYS];
  int low = dims[PREFILL_WINDOW] ? max(at - dims[PREFILL_WINDOW] + 1, 0) : 0;
  if (dims[PREFILL_START]) {
    low = max(low, start[(size_t)batch * queries + i]);
  }
  return low < high ? PrefillRange{low, high} : PrefillRange{0, 0};
}

// 2^(s - top), 0 for s = -inf even where the whole row is -inf: never -inf + inf.
__device__ inline float prefill_weight(float s, float top) {
  return exp2f(s - (top == -PREFILL_INF ? 0.0f : top));
}

__device__ inline int prefill_warp_min(int x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = min(x, __shfl_xor_sync(PREFILL_ALL, x, offset));
  }
  return x;
}

__device__ inline int prefill_warp_max(int x) {
  return -prefill_warp_min(-x);
}

__device__ inline float prefill_warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(PREFILL_ALL, x, offset);
  }
  return x;
}

__device__ inline float prefill_warp_top(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(PREFILL_ALL, x, offset));
  }
  return x;
}

// Rows base .. base + 31 of a head into a tile, zeros beyond the last.
template <int D, int LD, typename Reader>
__device__ inline void prefill_load(const Reader& reader, size_t head_row, int base, int keys, float* to) {
  for (int c = threadIdx.x; c < PREFILL_BK * D / 8; c += PREFILL_THREADS) {
    const int j = c / (D / 8), d = c % (D / 8) * 8;
    float* place = to + j * LD + d;
    if (base + j < keys) {
      reader.eight(head_row + base + j, d, place);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++) {
        place[e] = 0.0f;
      }
    }
  }
}

// Add the values of a tile, key by key; lane l has columns l, l + 32, ... With GUARD a row gets nothing of a key it does not see, not even
// by a weight of zero: a value may be NaN.
template <int D, bool GUARD>
__device__ inline void prefill_accumulate(
    float (&sum)[PREFILL_OWN][(D + 31) / 32], const float (&p)[PREFILL_OWN], const PrefillRange (&range)[PREFILL_OWN], const float* v_tile,
    int base, int lane) {
  for (int c = 0; c < PREFILL_BK; c++) {
    float value[(D + 31) / 32];
#pragma unroll
    for (int e = 0; e < (D + 31) / 32; e++) {
      const int d = lane + 32 * e;
      value[e] = d < D ? v_tile[c * (D + 4) + d] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < PREFILL_OWN; r++) {
      const float weight = __shfl_sync(PREFILL_ALL, p[r], c);
      if (!GUARD || (range[r].low <= base + c && base + c < range[r].high)) {
#pragma unroll
        for (int e = 0; e < (D + 31) / 32; e++) {
          sum[r][e] += weight * value[e];
        }
      }
    }
  }
}

// One tile. q_tile: 32 rows of D; kv_tile: 32 rows of D + 4, keys first, then values. Both aligned to 16 bytes.
template <int D, bool NORM, bool BIAS, bool VSCALE, typename Keys, typename Values, typename Q, typename N, typename C, typename S, typename O>
__device__ inline void prefill(
    const Q* q, const float* scale, const int* dims, const int* start, const N* k_norm, const C* k_bias, const S* v_scale, O* out, float* lse,
    const Keys& keys, const Values& values, float* q_tile, float* kv_tile) {
  constexpr int LD = D + 4, E = (D + 31) / 32;
  const int queries = dims[PREFILL_QUERIES], length = dims[PREFILL_KEYS], heads = dims[PREFILL_HEADS];
  const int head = blockIdx.y, batch = head / heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_head = batch * (heads / dims[PREFILL_GROUP]) + head % heads / dims[PREFILL_GROUP];
  const size_t head_row = (size_t)kv_head * length;

  // What the whole tile sees (any, all), from a row per lane; then this warp's own rows.
  const int tile_row = blockIdx.x * PREFILL_ROWS + lane;
  const PrefillRange row = prefill_range(dims, start, batch, tile_row);
  const int first = prefill_warp_min(row.low < row.high ? row.low : 0x7fffffff), end = prefill_warp_max(row.high);
  const int full_from = prefill_warp_max(row.low), full_to = prefill_warp_min(tile_row < queries ? row.high : 0x7fffffff);
  const int i = blockIdx.x * PREFILL_ROWS + warp * PREFILL_OWN;

  PrefillRange range[PREFILL_OWN];
  float sum[PREFILL_OWN][E], top[PREFILL_OWN], total[PREFILL_OWN];
#pragma unroll
  for (int r = 0; r < PREFILL_OWN; r++) {
    range[r] = prefill_range(dims, start, batch, i + r);
    top[r] = -PREFILL_INF;
    total[r] = 0.0f;
    const size_t q_row = ((size_t)head * queries + min(i + r, queries - 1)) * D;
    for (int e = 0; e < E; e++) {
      const int d = lane + 32 * e;
      sum[r][e] = 0.0f;
      if (d < D) {
        q_tile[(warp * PREFILL_OWN + r) * D + d] = (float)q[q_row + d] * (scale[0] * PREFILL_LOG2E);
      }
    }
  }

  for (int base = first; base < end; base += PREFILL_BK) {
    __syncthreads();
    prefill_load<D, LD>(keys, head_row, base, length, kv_tile);
    __syncthreads();

    float p[PREFILL_OWN] = {};
    for (int d = 0; d < D; d += 4) {
      const float4 k = *(const float4*)(kv_tile + lane * LD + d);
#pragma unroll
      for (int r = 0; r < PREFILL_OWN; r++) {
        const float4 x = *(const float4*)(q_tile + (warp * PREFILL_OWN + r) * D + d);
        p[r] += x.x * k.x + x.y * k.y + x.z * k.z + x.w * k.w;
      }
    }
    const int j = base + lane;
    const size_t token = head_row + min(j, length - 1);
    const float norm = NORM ? (float)k_norm[token] : 1.0f;
    const float bias = BIAS ? (float)k_bias[token] * PREFILL_LOG2E : 0.0f;
    const float factor = VSCALE ? (float)v_scale[token] : 1.0f;
#pragma unroll
    for (int r = 0; r < PREFILL_OWN; r++) {
      const float s = range[r].low <= j && j < range[r].high ? p[r] * norm + bias : -PREFILL_INF;
      const float largest = fmaxf(top[r], prefill_warp_top(s));
      const float keep = prefill_weight(top[r], largest);
      const float weight = prefill_weight(s, largest);
      top[r] = largest;
      total[r] = total[r] * keep + prefill_warp_sum(weight);
      p[r] = weight * factor;
#pragma unroll
      for (int e = 0; e < E; e++) {
        sum[r][e] *= keep;
      }
    }

    __syncthreads();
    prefill_load<D, LD>(values, head_row, base, length, kv_tile);
    __syncthreads();
    if (full_from <= base && base + PREFILL_BK <= full_to) {
      prefill_accumulate<D, false>(sum, p, range, kv_tile, base, lane);
    } else {
      prefill_accumulate<D, true>(sum, p, range, kv_tile, base, lane);
    }
  }

#pragma unroll
  for (int r = 0; r < PREFILL_OWN; r++) {
    if (i + r < queries) {
      const size_t out_row = (size_t)head * queries + i + r;
      if (lane == 0) {
        lse[out_row] = total[r] == 0.0f ? -PREFILL_INF : (top[r] + log2f(total[r])) * PREFILL_LN2;
      }
#pragma unroll
      for (int e = 0; e < E; e++) {
        if (lane + 32 * e < D) {
          out[out_row * D + lane + 32 * e] = (O)(total[r] == 0.0f ? 0.0f : sum[r][e] / total[r]);
        }
      }
    }
  }
}

// Row-owned form: one warp has ROWS queries to itself, KEYS keys stream by at a time; no shared memory, no barrier.
template <int D, int KEYS, int ROWS, bool NORM, bool VSCALE, typename KT, typename VT, typename Q, typename N, typename S, typename O>
__device__ inline void prefill_stream(
    const Q* q, const KT* k, const VT* v, const float* scale, const int* dims, const int* start, const N* k_norm, const S* v_scale, O* out,
    float* lse) {
  constexpr int E = D / 32;
  const int queries = dims[PREFILL_QUERIES], length = dims[PREFILL_KEYS], heads = dims[PREFILL_HEADS];
  const int block = (blockIdx.x * blockDim.x + threadIdx.x) / 32, head = blockIdx.y, batch = head / heads, lane = threadIdx.x % 32;
  const int kv_head = batch * (heads / dims[PREFILL_GROUP]) + head % heads / dims[PREFILL_GROUP];
  const size_t head_row = (size_t)kv_head * length;
  const int d = lane * E;

  float query[ROWS][E], sum[ROWS][E], top[ROWS], total[ROWS];
  PrefillRange range[ROWS];
  int first = length, end = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int i = block * ROWS + r;
    range[r] = prefill_range(dims, start, batch, i);
    if (range[r].low < range[r].high) {
      first = min(first, range[r].low);
      end = max(end, range[r].high);
    }
    top[r] = -PREFILL_INF;
    total[r] = 0.0f;
#pragma unroll
    for (int e = 0; e < E; e++) {
      query[r][e] = (float)q[((size_t)head * queries + min(i, queries - 1)) * D + d + e] * (scale[0] * PREFILL_LOG2E);
      sum[r][e] = 0.0f;
    }
  }

  for (int base = first; base < end; base += KEYS) {
    float s[ROWS][KEYS];
#pragma unroll
    for (int c = 0; c < KEYS; c++) {
      const size_t token = head_row + min(base + c, length - 1);
      const float norm = NORM ? (float)k_norm[token] : 1.0f;
      float key[E];
#pragma unroll
      for (int e = 0; e < E; e++) {
        key[e] = (float)k[token * D + d + e];
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float dot = 0.0f;
#pragma unroll
        for (int e = 0; e < E; e++) {
          dot += query[r][e] * key[e];
        }
        s[r][c] = prefill_warp_sum(dot) * norm;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float largest = top[r];
#pragma unroll
      for (int c = 0; c < KEYS; c++) {
        s[r][c] = range[r].low <= base + c && base + c < range[r].high ? s[r][c] : -PREFILL_INF;
        largest = fmaxf(largest, s[r][c]);
      }
      const float keep = prefill_weight(top[r], largest);
      top[r] = largest;
      total[r] *= keep;
#pragma unroll
      for (int e = 0; e < E; e++) {
        sum[r][e] *= keep;
      }
#pragma unroll
      for (int c = 0; c < KEYS; c++) {
        s[r][c] = prefill_weight(s[r][c], largest);
        total[r] += s[r][c];
      }
    }
#pragma unroll
    for (int c = 0; c < KEYS; c++) {
      const int j = base + c;
      const size_t token = head_row + min(j, length - 1);
      const float factor = VSCALE ? (float)v_scale[token] : 1.0f;
      float value[E];
#pragma unroll
      for (int e = 0; e < E; e++) {
        value[e] = (float)v[token * D + d + e];
      }
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        // Not by a weight of zero: a value that a row does not see may be NaN.
        if (range[r].low <= j && j < range[r].high) {
#pragma unroll
          for (int e = 0; e < E; e++) {
            sum[r][e] += s[r][c] * factor * value[e];
          }
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int i = block * ROWS + r;
    if (i < queries) {
      const size_t out_row = (size_t)head * queries + i;
      if (lane == 0) {
        lse[out_row] = total[r] == 0.0f ? -PREFILL_INF : (top[r] + log2f(total[r])) * PREFILL_LN2;
      }
#pragma unroll
      for (int e = 0; e < E; e++) {
        out[out_row * D + d + e] = (O)(total[r] == 0.0f ? 0.0f : sum[r][e] / total[r]);
      }
    }
  }
}

}  // namespace kvtool
