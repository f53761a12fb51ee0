// The kernel of decode_parts.cu, over its keys and values.

namespace kvtool {

template <int RB, bool NORM, bool BIAS, bool ZEROS, typename Keys, typename Values, typename Q, typename N, typename C, typename O>
__device__ __forceinline__ bool decode(
    const Q* q,
    const float* q_scale,
    const int* dims,
    const int* start,
    const N* k_norm,
    const C* k_bias,
    O* out,
    float* lse,
    Keys keys,
    Values values,
    char* memory,     // of the tables or of the warps; at least 18 KiB
    char* warps,      // of the values, where they have no table
    char* queries_at  // DECODE_HEADS * (DECODE_QUERY + 1) floats
) {
  const int thread_ = int(threadIdx.x);
  const int warp = thread_ / 32;
  const DecodeLane at(thread_ % 32);
  const int heads = dims[ATTEND_GROUP];
  const int tokens = dims[ATTEND_KEYS];
  const int splits = int(gridDim.y);
  const int blocks = (heads + RB - 1) / RB;
  const int block = int(blockIdx.x) % blocks;
  const int head = int(blockIdx.x) / blocks;  // of batch * H_kv
  const size_t query0 = size_t(head) * heads + block * RB;
  const int count = min(RB, heads - block * RB);
  int low;
  int high;
  attend_range(dims, start, head / dims[ATTEND_HEADS], 0, low, high);

  const DecodeQueries queries{reinterpret_cast<float*>(queries_at), reinterpret_cast<float*>(queries_at) + DECODE_HEADS * DECODE_QUERY};
  const int first = low / DECODE_STEP;
  const int steps = max((high + DECODE_STEP - 1) / DECODE_STEP - first, 0);
  const int each = (steps + splits - 1) / splits;
  const int stop = first + min(each * (int(blockIdx.y) + 1), steps);
  int step = first + each * int(blockIdx.y) + warp;
  const size_t row = size_t(head) * tokens;
  N norm{};
  C bias{};
  if (Keys::SHIFTS && tokens < DECODE_STEP) {
    return false;
  }

  if (!(keys.place(memory, thread_) && values.place(warps, thread_))) {
    return false;
  }
  // The last step is read from further left if it must be: what it repeats is masked.
  const auto begin = [&](int base) { return Keys::SHIFTS ? min(base, tokens - DECODE_STEP) : base; };
  const auto load_keys = [&](int step_) {
    const int base = begin(step_ * DECODE_STEP);
    if (Keys::SHIFTS || base + DECODE_STEP <= tokens) {
      keys.template load<true>(row, head, base, tokens, at);
    } else {
      keys.template load<false>(row, head, base, tokens, at);
    }
    const size_t own = row + (Keys::SHIFTS ? base + at.lane : min(base + at.lane, tokens - 1));
    if (NORM) {
      norm = k_norm[own];
    }
    if (BIAS) {
      bias = k_bias[own];
    }
  };
  const auto load_values = [&](int step_) {
    const int base = begin(step_ * DECODE_STEP);
    if (Keys::SHIFTS || base + DECODE_STEP <= tokens) {
      values.template load<true>(row, head, base, tokens, at);
    } else {
      values.template load<false>(row, head, base, tokens, at);
    }
  };
  if (step < stop) {
    load_keys(step);
    decode_commit();
    load_values(step);
    decode_commit();
  }
  bool sound = keys.prepare(memory, queries, q + (query0 + min(warp, count - 1)) * DECODE_DIM, thread_);
  sound = values.prepare(warps, thread_) && sound;
  if (!__syncthreads_and(sound)) {
    decode_commit();
    decode_wait();  // no copy may arrive later
    __syncthreads();
    return false;
  }
  keys.begin(queries, at);
  float factor[2];
  ATTEND_UNROLL
  for (int x = 0; x < 2; x++) {
    const int own = at.t % 2 * 2 + x;
    factor[x] = q_scale[dims[ATTEND_PER_ROW] ? query0 + min(own, count - 1) : 0] * ATTEND_LOG2E * keys.factor(queries, own);
  }
  DecodeState state;
  state.clear();

  for (; step < stop; step += DECODE_WARPS) {
    const int base = begin(step * DECODE_STEP);
    const int from = max(low, step * DECODE_STEP);
    const bool more = step + DECODE_WARPS < stop;
    float s[4][2];
    keys.dots(s, at, queries);
    const float norms = NORM ? float(norm) : 1.0f;
    const float biases = BIAS ? float(bias) * ATTEND_LOG2E : 0.0f;
    if (more) {
      load_keys(step + DECODE_WARPS);
    }
    decode_commit();  // empty groups, too: each wait is for all but the last one
    const bool whole = base >= from && base + DECODE_STEP <= high;
    ATTEND_UNROLL
    for (int r = 0; r < 4; r++) {
      const float own = NORM ? __shfl_sync(0xffffffffu, norms, at.place + 8 * r) : 1.0f;
      const float add = BIAS ? __shfl_sync(0xffffffffu, biases, at.place + 8 * r) : 0.0f;
      ATTEND_UNROLL
      for (int x = 0; x < 2; x++) {
        const float sum = Keys::WHOLE ? s[r][x] : s[r][x] + __shfl_xor_sync(0xffffffffu, s[r][x], 2);
        s[r][x] = sum * factor[x] * own + add;
      }
    }
    if (!whole) {
      __syncwarp();  // a branch: predicated, it would be there in every step
      ATTEND_UNROLL
      for (int r = 0; r < 4; r++) {
        const int j = base + at.place + 8 * r;
        if (j < from || j >= high) {
          s[r][0] = s[r][1] = -ATTEND_INF;
        }
      }
      if (base + at.lane < from || base + at.lane >= high) {
        values.hide();
      }
    }
    state.weigh(s);
    values.add(state, s, at);
    if (more) {
      load_values(step + DECODE_WARPS);
    }
    decode_commit();
  }

  // Merge the warps: (m, l), the sums of zeros, and (warp, head, channel) sums.
  __syncthreads();
  float* pool = reinterpret_cast<float*>(memory);
  float* ends = pool + DECODE_WARPS * DECODE_HEADS * DECODE_DIM;
  float* zeros = ends + DECODE_WARPS * DECODE_HEADS * 2;
  ATTEND_UNROLL
  for (int x = 0; x < 2; x++) {
    const int own = warp * DECODE_HEADS + at.t % 2 * 2 + x;
    ATTEND_UNROLL
    for (int offset = 4; offset < 32; offset *= 2) {
      state.l[x] += __shfl_xor_sync(0xffffffffu, state.l[x], offset);
      if (ZEROS) {
        state.zero[x][0] += __shfl_xor_sync(0xffffffffu, state.zero[x][0], offset);
        state.zero[x][1] += __shfl_xor_sync(0xffffffffu, state.zero[x][1], offset);
      }
    }
    if (at.g == 0) {
      if (at.t < 2) {
        ends[2 * own] = state.m[x];
        ends[2 * own + 1] = state.l[x];
      }
      if (ZEROS) {
        zeros[4 * own + at.t / 2 * 2] = state.zero[x][0];
        zeros[4 * own + at.t / 2 * 2 + 1] = state.zero[x][1];
      }
    }
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      float pair[2];
      ATTEND_UNROLL
      for (int k = 0; k < 2; k++) {
        const float sum = state.o[i][2 * k + x];
        pair[k] = (sum + __shfl_xor_sync(0xffffffffu, sum, 2)) * values.factor(i, k) * state.unit;
      }
      if (at.t < 2) {
        *reinterpret_cast<float2*>(pool + own * DECODE_DIM + Values::channel(i, at)) = make_float2(pair[0], pair[1]);
      }
    }
  }
  __syncthreads();
  const int own = thread_ / 64;
  if (own >= count) {
    return true;
  }
  const int d = thread_ % 64 * 2;
  float top = -ATTEND_INF;
  ATTEND_UNROLL
  for (int w = 0; w < DECODE_WARPS; w++) {
    top = fmaxf(top, ends[2 * (w * DECODE_HEADS + own)]);
  }
  float total = 0;
  float2 sum = make_float2(0, 0);
  ATTEND_UNROLL
  for (int w = 0; w < DECODE_WARPS; w++) {
    const int from = w * DECODE_HEADS + own;
    const float weight = attend_factor(ends[2 * from], top);
    const float2 part = *reinterpret_cast<const float2*>(pool + from * DECODE_DIM + d);
    const float zero = ZEROS ? zeros[4 * from + d / 32] : 0.0f;
    total += weight * ends[2 * from + 1];
    sum.x += weight * (part.x + zero);
    sum.y += weight * (part.y + zero);
  }
  const bool none = total == 0;
  const size_t index = (query0 + own) * splits + blockIdx.y;
  if (d == 0) {
    lse[index] = none ? -ATTEND_INF : (top - DECODE_LIFT) * ATTEND_LN2 + logf(total);
  }
  out[index * DECODE_DIM + d] = O(none ? 0.0f : sum.x / total);
  out[index * DECODE_DIM + d + 1] = O(none ? 0.0f : sum.y / total);
  return true;
}

}  // namespace kvtool

// MLX writes the signature of the kernel: this bounds its registers, so that two blocks fit on a multiprocessor.
#undef __global__
#define __global__ __attribute__((global)) __attribute__((launch_bounds(256, 2)))
