// Attention of many queries on tensor cores, over the readers of prefill_parts.cu; ranges are those of prefill.cu.
//
// A block of 4 warps owns 128 rows of one KV head, the query heads of its group position by position, so that a key that has been loaded
// or decoded serves all of them; keys come by in tiles of 64 (FlashAttention-2, Dao 2023). Both products are mma.m16n8k16 on 16-bit
// operands with float32 sums; a warp has 32 rows, its queries come from shared memory, its weights stay in registers. Copies of the next
// tile (rows, or their codes) run while this one is attended to.
//
// Scores, the maximum and the sum of weights are float32; weights are rounded to 16 bits, 2^TILE_LIFT times larger, further from the
// smallest half.

namespace kvtool {

// One element of a tile.
template <typename T>
__device__ __forceinline__ T* tile_element(char* tile, int row, int d) {
  return reinterpret_cast<T*>(tile + tile_at<TILE_KEYS>(row, d / 8)) + d % 8;
}

// What a thread has of 64 rows: of rows lane / 4 and lane / 4 + 8 of its warp's 16, columns 2 (lane % 4) and the next of every 8.
template <int D>
struct TileSums {
  float o[D / 8][4];  // sums of values, over the unit of their factors
  float top[2];       // largest score, in log2, or up to the slack less
  float total[2];     // sums of this thread's weights

  __device__ __forceinline__ void clear() {
    top[0] = top[1] = -PREFILL_INF;
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    }
  }

  __device__ __forceinline__ void scale(float first, float second) {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      o[n][0] *= first;
      o[n][1] *= first;
      o[n][2] *= second;
      o[n][3] *= second;
    }
  }

  // Scores `by` of which is in log2, -inf where not visible, become weights 2^(s - top + lift); sums are rescaled only where one passes the
  // maximum by more than the slack.
  __device__ __forceinline__ void weigh(float (&s)[TILE_KEYS / 8][4], float by) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      largest[h] = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < TILE_KEYS / 8; n++) {
        largest[h] = fmaxf(largest[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      }
      largest[h] *= by;
    }
    if (__any_sync(PREFILL_ALL, largest[0] > top[0] + TILE_SLACK || largest[1] > top[1] + TILE_SLACK)) {
      float keep[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float x = fmaxf(largest[h], __shfl_xor_sync(PREFILL_ALL, largest[h], 1));
        x = fmaxf(x, __shfl_xor_sync(PREFILL_ALL, x, 2));
        x = fmaxf(x, top[h]);
        keep[h] = top[h] == -PREFILL_INF ? 1.0f : tile_exp2(top[h] - x);  // nothing so far, but what tile_settle added
        top[h] = x;
        total[h] *= keep[h];
      }
      scale(keep[0], keep[1]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float from = top[h] == -PREFILL_INF ? 0.0f : top[h] - TILE_LIFT;
#pragma unroll
      for (int n = 0; n < TILE_KEYS / 8; n++) {
#pragma unroll
        for (int x = 2 * h; x < 2 * h + 2; x++) {
          s[n][x] = tile_exp2(fmaf(s[n][x], by, -from));
          total[h] += s[n][x];
        }
      }
    }
  }

  // Weights take the factors of values. That of a key not seen may be NaN; in a `whole` tile all are seen.
  __device__ __forceinline__ void take(float (&s)[TILE_KEYS / 8][4], const float2* factors, bool whole) {
    if (whole) {
#pragma unroll
      for (int n = 0; n < TILE_KEYS / 8; n++) {
        const float2 f = factors[4 * n];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[n][e] *= e % 2 ? f.y : f.x;
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < TILE_KEYS / 8; n++) {
        const float2 f = factors[4 * n];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[n][e] = s[n][e] == 0.0f ? 0.0f : s[n][e] * (e % 2 ? f.y : f.x);
        }
      }
    }
  }
};

// Factors of a tile's values are over a power of two, of the whole block, that keeps weights times them within a half.
struct TileFactors {
  float unit = 1.0f, inverse = 1.0f;
  float cap = 0.0f;  // factors up to here do

  __device__ __forceinline__ bool fits(float factor) const {
    return !(isfinite(factor) && fabsf(factor) > cap);
  }

  // Another power of two, for the factors that threads 0 to 63 have, which they put in `side`. Returns what sums are multiplied by.
  __device__ __forceinline__ float grow(float* side, float factor) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < TILE_KEYS) {
      side[threadIdx.x] = isfinite(factor) ? fabsf(factor) : 0.0f;
    }
    __syncthreads();
    const float before = unit;
    tile_unit(prefill_warp_top(fmaxf(side[lane], side[32 + lane])), unit, inverse);
    cap = 2.0f * unit;
    __syncthreads();
    if (threadIdx.x < TILE_KEYS) {
      side[threadIdx.x] = factor * inverse;
    }
    __syncthreads();
    return before * inverse;
  }
};

// Factors and biases of the keys, in two rows of shared memory.
__device__ __forceinline__ void tile_scale(float (&s)[TILE_KEYS / 8][4], const float* side) {
#pragma unroll
  for (int n = 0; n < TILE_KEYS / 8; n++) {
    const float2 by = *reinterpret_cast<const float2*>(side + 8 * n);
    const float2 plus = *reinterpret_cast<const float2*>(side + TILE_KEYS + 8 * n);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[n][e] = fmaf(s[n][e], e % 2 ? by.y : by.x, e % 2 ? plus.y : plus.x);
    }
  }
}

// Scores of keys that a row does not see, from its column `first` on.
__device__ __forceinline__ void tile_hide(float (&s)[TILE_KEYS / 8][4], PrefillRange upper, PrefillRange lower, int first) {
#pragma unroll
  for (int n = 0; n < TILE_KEYS / 8; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int j = first + 8 * n + e % 2;
      const PrefillRange& range = e < 2 ? upper : lower;
      s[n][e] = range.low <= j && j < range.high ? s[n][e] : -PREFILL_INF;
    }
  }
}

// Before a tile that not every row sees whole: values that are not finite go to the rows that see them, whatever their weight, and become
// zero. For the whole block.
template <int D, bool VSCALE, typename T>
__device__ __forceinline__ void tile_settle(
    char* tile, TileSums<D> (&sums)[2], const PrefillRange* ranges, const float* factors, int base, int row, int column) {
  const uint32_t exponent = tile_exponent(T());
  bool odd = false;
  for (int x = threadIdx.x; x < TILE_KEYS * D / 2; x += TILE_THREADS) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(tile)[x];
    odd = odd || (pair & exponent) == exponent || (pair >> 16 & exponent) == exponent;
  }
  if (!__syncthreads_or(odd)) {
    return;
  }
#pragma unroll 1
  for (int j = 0; j < TILE_KEYS; j++) {
    bool seen[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const PrefillRange range = ranges[row + 64 * (i / 2) + i % 2 * 8];
      seen[i] = range.low <= base + j && base + j < range.high;
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
#pragma unroll
      for (int x = 0; x < 2; x++) {
        const float value = float(*tile_element<T>(tile, j, 8 * n + column + x));
        if (!isfinite(value)) {
          const float more = VSCALE ? value * factors[j] : value;
#pragma unroll
          for (int i = 0; i < 4; i++) {
            sums[i / 2].o[n][i % 2 * 2 + x] += seen[i] ? more : 0.0f;
          }
        }
      }
    }
  }
  __syncthreads();
  for (int x = threadIdx.x; x < TILE_KEYS * D; x += TILE_THREADS) {
    T* value = tile_element<T>(tile, x / D, x % D);
    if (!isfinite(float(*value))) {
      *value = T(0.0f);
    }
  }
  tile_publish();
  __syncthreads();
}

template <
    int D, bool NORM, bool BIAS, bool VSCALE, bool TURN, typename Keys, typename Values, typename Q, typename N, typename C, typename S,
    typename O>
__device__ __forceinline__ void prefill_tiles(
    const Q* q, const float* scale, const int* dims, const int* start, const N* k_norm, const C* k_bias, const S* v_scale,
    const float* rotation, O* out, float* lse, Keys keys, Values values) {
  using Plan = TilePlan<D, Keys, Values>;
  constexpr bool OWN = NORM || BIAS;  // keys have factors of their own: scores are scaled before the maximum
  constexpr bool CODED = Keys::CODED || Values::CODED;
  constexpr int AHEAD = Keys::CODED ? 2 : 1;  // codes of keys are decoded while the tile before is attended to
  constexpr bool WEIGHED = VSCALE && !Values::CODED;  // weights take the factors of values; else values that are decoded
  char* memory = tile_memory();
  const int queries = dims[PREFILL_QUERIES], length = dims[PREFILL_KEYS], heads = dims[PREFILL_HEADS], group = dims[PREFILL_GROUP];
  const int kv_heads = heads / group, rows = queries * group;
  // Rows of the end first, which see the most.
  const int tiles_of_rows = (rows + TILE_ROWS - 1) / TILE_ROWS, all = int(gridDim.x) / tiles_of_rows;
  const int row0 = (tiles_of_rows - 1 - int(blockIdx.x) / all) * TILE_ROWS, kv_head = int(blockIdx.x) % all, batch = kv_head / kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const size_t head_row = (size_t)kv_head * length;
  const size_t q_head = (size_t)kv_head * group;
  PrefillRange* ranges = reinterpret_cast<PrefillRange*>(memory + Plan::RANGES);
  float* sides = reinterpret_cast<float*>(memory + Plan::SIDES);

  // What the rows see: any of them, all of them.
  {
    const int row = row0 + int(threadIdx.x);
    const PrefillRange range = prefill_range(dims, start, batch, row < rows ? row / group : queries);
    ranges[threadIdx.x] = range;
    const int first = prefill_warp_min(range.low < range.high ? range.low : 0x7fffffff), end = prefill_warp_max(range.high);
    const int full_from = prefill_warp_max(range.low), full_to = prefill_warp_min(row < rows ? range.high : 0x7fffffff);
    if (lane == 0) {
      reinterpret_cast<int4*>(memory + Plan::LIMITS)[warp] = make_int4(first, end, full_from, full_to);
    }
  }
  // Their queries.
  const bool aligned = tile_aligned(q);
#pragma unroll
  for (int i = 0; i < TILE_ROWS * D / 8 / TILE_THREADS; i++) {
    const int x = threadIdx.x + i * TILE_THREADS, r = x / (D / 8), c = x % (D / 8), row = min(row0 + r, rows - 1);
    const Q* from = q + ((q_head + row % group) * queries + row / group) * D + c * 8;
    char* place = memory + Plan::QUERIES + tile_at<TILE_ROWS>(r, c);
    if (aligned) {
      tile_copy<16>(place, from, row0 + r < rows);
    } else {
      tile_copy_bytes<16>(place, from, row0 + r < rows);
    }
  }
  keys.prepare(memory + Plan::KEY_TABLE);
  values.prepare(memory + Plan::VALUE_TABLE);
  const float signed_factor = scale[0] * PREFILL_LOG2E;
  // The maximum is taken before scaling where it can be: by a factor that is positive.
  const float factor = OWN ? signed_factor : signed_factor == 0.0f ? 1e-30f : fabsf(signed_factor);
  if (!OWN && signed_factor < 0.0f) {
    tile_wait();
#pragma unroll
    for (int i = 0; i < TILE_ROWS * D / 8 / TILE_THREADS; i++) {
      const int x = threadIdx.x + i * TILE_THREADS;
      uint4* chunk = reinterpret_cast<uint4*>(memory + Plan::QUERIES + tile_at<TILE_ROWS>(x / (D / 8), x % (D / 8)));
      const uint4 was = *chunk;
      *chunk = make_uint4(was.x ^ 0x80008000u, was.y ^ 0x80008000u, was.z ^ 0x80008000u, was.w ^ 0x80008000u);
    }
  }
  __syncthreads();
  int first = 0x7fffffff, end = 0, full_from = 0, full_to = 0x7fffffff;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const int4 limit = reinterpret_cast<const int4*>(memory + Plan::LIMITS)[w];
    first = min(first, limit.x);
    end = max(end, limit.y);
    full_from = max(full_from, limit.z);
    full_to = min(full_to, limit.w);
  }
  const int begin = min(first, end) / TILE_KEYS * TILE_KEYS, tiles = (end - begin + TILE_KEYS - 1) / TILE_KEYS;

  // This thread's rows are own + 64 m + 8 h, its columns of 8 are column and the next.
  const int own = warp * 16 + lane / 4, column = lane % 4 * 2;
  TileSums<D> sums[2];
  sums[0].clear();
  sums[1].clear();
  TileFactors factors;

  // Factors of the next tile's keys wait in registers: thread j and thread 64 + j are key j's.
  N next_norm{};
  C next_bias{};
  S next_scale{};
  const auto base_of = [&](int t) { return begin + t * TILE_KEYS; };
  const auto key_stage = [&](int t) { return memory + Plan::KEY_STAGES + t % 2 * Keys::STAGE; };
  const auto value_stage = [&](int t) { return memory + Plan::VALUE_STAGES + t % 2 * Values::STAGE; };
  const auto fetch_keys = [&](int t) {
    if (t < tiles) {
      keys.fetch(key_stage(t), head_row, base_of(t), length);
    }
  };
  const auto fetch_values = [&](int t) {
    if (t < tiles) {
      values.fetch(value_stage(t), head_row, base_of(t), length);
      const size_t token = head_row + min(base_of(t) + int(threadIdx.x) % TILE_KEYS, length - 1);
      if (NORM) {
        next_norm = k_norm[token];
      }
      if (BIAS) {
        next_bias = k_bias[token];
      }
      if (VSCALE) {
        next_scale = v_scale[token];
      }
    }
  };
  if (tiles > 0) {
    for (int t = 0; t < AHEAD; t++) {
      fetch_keys(t);
    }
    fetch_values(0);
    if (Keys::CODED) {
      tile_wait();
      __syncthreads();
      keys.decode(key_stage(0), memory + Plan::KEY_TILE, memory + Plan::KEY_TABLE);
    }
  }

  for (int t = 0; t < tiles; t++) {
    const int base = base_of(t);
    float* side = sides + t % 2 * (3 * TILE_KEYS);
    const float value_factor = VSCALE ? float(next_scale) : 1.0f;
    if (threadIdx.x < TILE_KEYS) {
      if (OWN) {
        side[threadIdx.x] = factor * (NORM ? float(next_norm) : 1.0f);
      }
      if (VSCALE) {
        side[2 * TILE_KEYS + threadIdx.x] = value_factor * factors.inverse;
      }
    } else if (OWN) {
      side[threadIdx.x] = BIAS ? float(next_bias) * PREFILL_LOG2E : 0.0f;
    }
    tile_wait();
    tile_publish();
    if (!VSCALE) {
      __syncthreads();
    } else if (__syncthreads_or(!factors.fits(value_factor))) {
      const float by = factors.grow(side + 2 * TILE_KEYS, value_factor);
      sums[0].scale(by, by);
      sums[1].scale(by, by);
    }
    fetch_keys(t + AHEAD);
    fetch_values(t + 1);
    const char* key_tile = Keys::CODED ? memory + Plan::KEY_TILE : key_stage(t);
    char* value_tile = Values::CODED ? memory + Plan::VALUE_TILE : value_stage(t);
    const bool whole = full_from <= base && base + TILE_KEYS <= full_to;
    // Values are decoded while the products of the scores run. Once all warps have their scores, the tile of keys is free: the next one,
    // whose codes are there, is decoded while the products of the values run. (After the last there are other codes, of no use.)
    const auto decode_next = [&] { keys.decode(key_stage(t + 1), memory + Plan::KEY_TILE, memory + Plan::KEY_TABLE); };
    const auto decode = [&] {
      values.template decode<VSCALE>(value_stage(t), value_tile, memory + Plan::VALUE_TABLE, side + 2 * TILE_KEYS);
      tile_publish();
    };
    const auto settle = [&] {
      if (!whole) {
        tile_settle<D, WEIGHED, typename Values::T>(value_tile, sums, ranges, side + 2 * TILE_KEYS, base, own, column);
      }
    };
    const auto meet = [&] {
      if (CODED) {
        __syncthreads();
        settle();
      }
    };

    float s[2][TILE_KEYS / 8][4];
    const auto weigh = [&](int m) {
      if (OWN) {
        tile_scale(s[m], side + column);
      }
      if (!whole) {
        tile_hide(s[m], ranges[own + 64 * m], ranges[own + 64 * m + 8], base + column);
      }
      sums[m].weigh(s[m], OWN ? 1.0f : factor);
      if (WEIGHED) {
        sums[m].take(s[m], reinterpret_cast<const float2*>(side + 2 * TILE_KEYS + column), whole);
      }
    };
    if (!CODED) {
      settle();
    }
#ifdef TILE_GROUP
    // The products of one half of the rows run while the other is weighed.
    tile_group_fence();
    tile_group_scores<D>(s[0], memory + Plan::QUERIES, key_tile, Q());
    tile_group_scores<D>(s[1], memory + Plan::QUERIES + 64 * 128, key_tile, Q());
    decode();
    tile_group_wait<1>();
    tile_hold(s[0]);
    weigh(0);
    if (CODED) {
      tile_group_wait<0>();
      tile_hold(s[1]);
    }
    meet();
    tile_group_values<D>(sums[0].o, s[0], value_tile, typename Values::T());
    if (!CODED) {
      tile_group_wait<1>();
      tile_hold(s[1]);
    }
    weigh(1);
    tile_group_values<D>(sums[1].o, s[1], value_tile, typename Values::T());
    decode_next();
    tile_group_wait<0>();
    tile_hold(sums[0].o);
    tile_hold(sums[1].o);
#else
    tile_scores<D>(s, memory + Plan::QUERIES, key_tile, warp, lane, Q());
    decode();
    weigh(0);
    weigh(1);
    meet();
    tile_values<D>(sums[0].o, sums[1].o, s, value_tile, lane, typename Values::T());
    decode_next();
#endif
  }
  tile_wait();

  // Where a row's result is, or nothing.
  const auto place = [&](int m, int h) {
    const int row = row0 + own + 64 * m + 8 * h;
    return row < rows ? out + ((q_head + row % group) * queries + row / group) * D + column : nullptr;
  };
#pragma unroll
  for (int m = 0; m < 2; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = sums[m].total[h] + __shfl_xor_sync(PREFILL_ALL, sums[m].total[h], 1);
      sum += __shfl_xor_sync(PREFILL_ALL, sum, 2);
      const int r = own + 64 * m + 8 * h;
      const bool none = sum == 0.0f || ranges[r].low >= ranges[r].high;
      O* to = place(m, h);
      if (to != nullptr && lane % 4 == 0) {
        lse[(to - out) / D] = none ? -PREFILL_INF : (sums[m].top[h] - TILE_LIFT) * PREFILL_LN2 + logf(sum);
      }
      const float by = (VSCALE && !WEIGHED ? 1.0f / TILE_RAISE : 1.0f) / sum;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        float& x = sums[m].o[n][2 * h];
        float& y = sums[m].o[n][2 * h + 1];
        x = none ? 0.0f : x * by * factors.unit * values.unit;
        y = none ? 0.0f : y * by * factors.unit * values.unit;
        if (!TURN && to != nullptr) {
          tile_store(to + 8 * n, x, y);
        }
      }
    }
  }
  if (TURN) {
    static_assert(4 * D * D <= Plan::SIDES, "R has the place of tiles");
    tile_stage_turn<D>(rotation, memory);
    tile_turn<D>(sums[0].o, sums[1].o, memory, lane, [&](int m, int h, int d, float x, float y) {
      O* to = place(m, h);
      if (to != nullptr) {
        tile_store(to + d, x, y);
      }
    });
  }
}

}  // namespace kvtool

// MLX writes the signature of the kernel: this bounds its registers, so that two blocks fit on a multiprocessor.
#undef __global__
#define __global__ __attribute__((global)) __attribute__((launch_bounds(128, 2)))
