// Attention of many queries on 8 x 8 matrices; after attend.metal, whose sizes and ranges these are, and attend_readers.metal.
//
// A threadgroup of 8 SIMD-groups owns 64 query rows of one KV head (the heads of a group position by position, so that a key that has been
// loaded or decoded serves all of them) and one split of the keys they see. Keys and values come by in tiles of BK, decoded into
// threadgroup memory; tiles that no row sees are not loaded (FlashAttention, Dao et al. 2022). A SIMD-group has 8 rows: their queries,
// scores and sums stay in registers. Softmax in base 2 and sums in float32: operands of 16 bits are exact, weights are not rounded.

namespace kvtool {

constant constexpr int PREFILL_SIMDS = 8;
constant constexpr int PREFILL_ROWS = 8 * PREFILL_SIMDS;

// ---- Readers: elements d .. d + 7 of token j's row, d a multiple of 8, as a tile holds them

METAL_FUNC float4 prefill_four(const device float* from) {
  return float4(*(const device packed_float4*)from);
}
// Of 16 bits.
template <typename S>
METAL_FUNC metal::vec<S, 4> prefill_four(const device S* from) {
  return as_type<metal::vec<S, 4>>(ushort4(*(const device packed_ushort4*)from));
}

// Rows of S as they are.
template <typename S, typename T, int D>
struct PlainRows {
  typedef T tile;
  const device S* data;
  int tokens;

  METAL_FUNC void load(thread T* x, int head, int j, int d) {
    const device S* from = data + (size_t(head) * tokens + j) * D + d;
    const metal::vec<S, 4> low = prefill_four(from);
    const metal::vec<S, 4> high = prefill_four(from + 4);
    ATTEND_UNROLL
    for (int e = 0; e < 4; e++) {
      x[e] = T(low[e]);
      x[e + 4] = T(high[e]);
    }
  }
};

// Signs, 8 a byte, lowest bit first, 1 for +1.
template <typename T, int D>
struct SignRows {
  typedef T tile;
  const device uint8_t* bits;
  int tokens;

  METAL_FUNC void load(thread T* x, int head, int j, int d) {
    const uint byte = bits[(size_t(head) * tokens + j) * (D / 8) + d / 8];
    ATTEND_UNROLL
    for (int e = 0; e < 8; e++) {
      x[e] = byte >> e & 1 ? T(1.0f) : T(-1.0f);
    }
  }
};

// What a reader of attend_readers.metal with E = 8 makes of codes.
template <typename Reader>
struct CodedRows {
  typedef float tile;
  Reader reader;

  METAL_FUNC void load(thread float* x, int head, int j, int d) {
    reader.load(x, head, j, d);
  }
};

// ---- 8 x 8 matrices

// The lane that holds column c of this lane's row.
METAL_FUNC ushort prefill_lane(uint lane, int c) {
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

// 2^(s - top), 0 for s = -inf even where the whole row is -inf: never -inf + inf.
METAL_FUNC float prefill_power(float s, float top) {
  return metal::precise::exp2(s - (top == -INFINITY ? 0.0f : top));
}

// Rows base .. base + BK - 1 of a head into a tile, zeros from `keys` on. With `check`, whether this lane met a value that is not finite.
template <int D, int BK, typename Reader>
METAL_FUNC bool prefill_load(
    thread Reader& reader,
    int head,
    int base,
    int keys,
    bool check,
    threadgroup metal::vec<typename Reader::tile, 4>* tile,
    uint thread_index) {
  typedef typename Reader::tile T;
  bool odd = false;
  for (int c = int(thread_index); c < BK * D / 8; c += 32 * PREFILL_SIMDS) {
    const int j = c / (D / 8);
    const int d = c % (D / 8) * 8;
    T x[8] = {};
    if (base + j < keys) {
      reader.load(x, head, base + j, d);
    }
    for (int e = 0; check && e < 8; e++) {
      odd = odd || !metal::isfinite(float(x[e]));
    }
    threadgroup metal::vec<T, 4>* to = tile + (j * (D + 8) + d) / 4;
    to[0] = metal::vec<T, 4>(x[0], x[1], x[2], x[3]);
    to[1] = metal::vec<T, 4>(x[4], x[5], x[6], x[7]);
  }
  return odd;
}

// k_tile, v_tile: BK rows of D + 8; sides: of each key its norm, bias and value's factor; odd: a flag for each SIMD-group. SIGNS: of a query, its signs count (>= 0).
template <
    int D, int BK, bool SIGNS, bool NORM, bool BIAS, bool VSCALE, typename Keys, typename Values,
    typename Q, typename N, typename C, typename S, typename O>
METAL_FUNC void prefill_tiles(
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
    threadgroup metal::vec<typename Keys::tile, 4>* k_tile,
    threadgroup metal::vec<typename Values::tile, 4>* v_tile,
    threadgroup float* sides,
    threadgroup int* odd,
    uint block,
    uint split,
    uint sg,
    uint lane) {
  typedef typename Keys::tile KT;
  typedef typename Values::tile VT;
  typedef metal::simdgroup_matrix<float, 8, 8> Sums;
  constexpr int LD = D + 8;
  const int group = dims[ATTEND_GROUP];
  const int queries = dims[ATTEND_QUERIES];
  const int length = dims[ATTEND_KEYS];
  const int splits = dims[ATTEND_SPLITS];
  const int rows = group * queries;
  const int blocks = (rows + PREFILL_ROWS - 1) / PREFILL_ROWS;
  // Rows of the end first, which see the most.
  const int row0 = (blocks - 1 - int(block) % blocks) * PREFILL_ROWS;
  const int head = int(block) / blocks;  // of batch * H_kv
  const int batch = head / dims[ATTEND_HEADS];
  const size_t head_row = size_t(head) * length;

  // What the rows see: any of them, all of them.
  int first = INT_MAX;
  int end = 0;
  int full_from = 0;
  int full_to = INT_MAX;
  for (int r = row0 + int(lane); r < row0 + PREFILL_ROWS; r += 32) {
    int low;
    int high;
    attend_range(dims, start, batch, r, low, high);
    first = metal::min(first, low < high ? low : INT_MAX);
    end = metal::max(end, high);
    full_from = metal::max(full_from, low);
    full_to = metal::min(full_to, r < rows ? high : INT_MAX);
  }
  first = simd_min(first);
  end = simd_max(end);
  full_from = simd_max(full_from);
  full_to = simd_min(full_to);
  const int tiles = first < end ? (end - first + BK - 1) / BK : 0;
  const int each = (tiles + splits - 1) / splits;
  const int last = metal::min(each * (int(split) + 1), tiles);

  // This lane's row, its queries, its columns.
  const int row = row0 + int(sg) * 8 + matrix_row(lane);
  const int column = matrix_column(lane);
  int low;
  int high;
  attend_range(dims, start, batch, row, low, high);
  const int real = metal::min(row, rows - 1);
  const size_t q_row = size_t(head) * rows + (real % group) * queries + real / group;
  const float factor = q_scale[dims[ATTEND_PER_ROW] ? q_row : 0] * ATTEND_LOG2E;
  metal::simdgroup_matrix<KT, 8, 8> query[D / 8];
  Sums sum[D / 8];
  ATTEND_UNROLL
  for (int f = 0; f < D / 8; f++) {
    ATTEND_UNROLL
    for (int e = 0; e < 2; e++) {
      const float x = float(q[q_row * D + f * 8 + column + e]);
      query[f].thread_elements()[e] = KT(SIGNS ? (x >= 0 ? 1.0f : -1.0f) : x);
      sum[f].thread_elements()[e] = 0;
    }
  }
  float top = -INFINITY;
  float total = 0;

  for (int t = each * int(split); t < last; t++) {
    const int base = first + t * BK;
    const bool whole = full_from <= base && base + BK <= full_to;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    prefill_load<D, BK>(keys, head, base, length, false, k_tile, sg * 32 + lane);
    const bool met = prefill_load<D, BK>(values, head, base, length, !whole, v_tile, sg * 32 + lane);
    const int side = int(sg * 32 + lane);
    if (side < BK) {
      const size_t token = head_row + metal::min(base + side, length - 1);
      if (NORM) {
        sides[side] = float(k_norm[token]);
      }
      if (BIAS) {
        sides[BK + side] = float(k_bias[token]) * ATTEND_LOG2E;
      }
      if (VSCALE) {
        sides[2 * BK + side] = float(v_scale[token]);
      }
    }
    const bool any = simd_any(met);
    if (lane == 0) {
      odd[sg] = any;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    Sums s[BK / 8];
    ATTEND_UNROLL
    for (int n = 0; n < BK / 8; n++) {
      s[n] = Sums(0.0f);
    }
    ATTEND_UNROLL
    for (int f = 0; f < D / 8; f++) {
      ATTEND_UNROLL
      for (int n = 0; n < BK / 8; n++) {
        metal::simdgroup_matrix<KT, 8, 8> k;
        simdgroup_load(k, (const threadgroup KT*)k_tile + n * 8 * LD + f * 8, LD, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(s[n], query[f], k, s[n]);
      }
    }

    float largest = top;
    ATTEND_UNROLL
    for (int n = 0; n < BK / 8; n++) {
      ATTEND_UNROLL
      for (int e = 0; e < 2; e++) {
        const int at = n * 8 + column + e;
        const int j = base + at;
        float x = s[n].thread_elements()[e] * factor;
        x = NORM ? x * sides[at] : x;
        x = BIAS ? x + sides[BK + at] : x;
        x = whole || (low <= j && j < high) ? x : -INFINITY;
        s[n].thread_elements()[e] = x;
        largest = metal::max(largest, x);
      }
    }
    largest = prefill_row_max(largest);
    const float keep = prefill_power(top, largest);
    top = largest;
    float added = 0;
    ATTEND_UNROLL
    for (int n = 0; n < BK / 8; n++) {
      ATTEND_UNROLL
      for (int e = 0; e < 2; e++) {
        const int at = n * 8 + column + e;
        const int j = base + at;
        const float p = prefill_power(s[n].thread_elements()[e], top);
        added += p;
        s[n].thread_elements()[e] = VSCALE && (whole || (low <= j && j < high)) ? p * sides[2 * BK + at] : p;
      }
    }
    total = total * keep + prefill_row_sum(added);
    ATTEND_UNROLL
    for (int f = 0; f < D / 8; f++) {
      ATTEND_UNROLL
      for (int e = 0; e < 2; e++) {
        sum[f].thread_elements()[e] *= keep;
      }
    }

    int anywhere = 0;
    for (int i = 0; i < PREFILL_SIMDS; i++) {
      anywhere |= odd[i];
    }
    if (!anywhere) {
      ATTEND_UNROLL
      for (int n = 0; n < BK / 8; n++) {
        ATTEND_UNROLL
        for (int f = 0; f < D / 8; f++) {
          metal::simdgroup_matrix<VT, 8, 8> v;
          simdgroup_load(v, (const threadgroup VT*)v_tile + n * 8 * LD + f * 8, LD, ulong2(0, 0), false);
          simdgroup_multiply_accumulate(sum[f], s[n], v, sum[f]);
        }
      }
      continue;
    }
    // A value that is not finite: a weight of zero would not keep it from the rows that do not see it.
    for (int n = 0; n < BK / 8; n++) {
      for (int c = 0; c < 8; c++) {
        const float p = simd_shuffle(s[n].thread_elements()[c & 1], prefill_lane(lane, c));
        const int j = base + n * 8 + c;
        const threadgroup VT* value = (const threadgroup VT*)v_tile + (n * 8 + c) * LD + column;
        for (int f = 0; low <= j && j < high && f < D / 8; f++) {
          for (int e = 0; e < 2; e++) {
            sum[f].thread_elements()[e] += p * float(value[f * 8 + e]);
          }
        }
      }
    }
  }

  if (row >= rows) {
    return;
  }
  const size_t index = q_row * splits + split;
  if (column == 0) {
    lse[index] = total == 0 ? -INFINITY : (top + metal::precise::log2(total)) * ATTEND_LN2;
  }
  ATTEND_UNROLL
  for (int f = 0; f < D / 8; f++) {
    ATTEND_UNROLL
    for (int e = 0; e < 2; e++) {
      out[index * D + f * 8 + column + e] = O(total == 0 ? 0.0f : sum[f].thread_elements()[e] / total);
    }
  }
}

}  // namespace kvtool
