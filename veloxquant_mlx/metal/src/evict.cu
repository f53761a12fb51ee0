// Eviction of rows from a full cache: choose a row, or a set of rows, and close the gaps. Rows are (group, row, element).

#define EVICT_ALL 0xffffffffu
#define EVICT_INF __int_as_float(0x7f800000)
#define EVICT_NO_ROW 0x7fffffff

namespace kvtool {

// NaN never ranks as the smallest.
__device__ inline float evict_rank(float x) {
  return x != x ? EVICT_INF : x;
}

// What a row is ranked by: score + tau * gumbel in two roundings, as the reference has it; without noise the score alone.
template <bool NOISE>
__device__ inline float evict_selection(const float* scores, const float* gumbel, float tau, size_t i) {
  return evict_rank(NOISE ? __fadd_rn(scores[i], __fmul_rn(tau, gumbel[i])) : scores[i]);
}

struct EvictBest {
  float value;
  int row;
};

// The better of each lane's candidate over the warp: smallest value, then lowest row. A lane without one has (inf, INT_MAX).
__device__ inline EvictBest evict_warp_best(EvictBest mine) {
  for (int offset = 16; offset > 0; offset /= 2) {
    const float value = __shfl_xor_sync(EVICT_ALL, mine.value, offset);
    const int row = __shfl_xor_sync(EVICT_ALL, mine.row, offset);
    if (value < mine.value || (value == mine.value && row < mine.row)) {
      mine.value = value;
      mine.row = row;
    }
  }
  return mine;
}

// Row of the smallest selection in rows [first, stop) of one group; the block, whole warps, works on it together.
template <bool NOISE>
__device__ inline void evict_lowest(
    const float* scores, const float* gumbel, const float* tau, const int* dims, int* gone, EvictBest* partial) {
  const int n = dims[0], first = dims[1], stop = dims[2], group = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  EvictBest best = {EVICT_INF, EVICT_NO_ROW};
  for (int row = first + (int)threadIdx.x; row < stop; row += blockDim.x) {
    const float value = evict_selection<NOISE>(scores, gumbel, tau[0], (size_t)group * n + row);
    if (best.row == EVICT_NO_ROW || value < best.value) {
      best.value = value;
      best.row = row;
    }
  }
  best = evict_warp_best(best);
  if (lane == 0) {
    partial[warp] = best;
  }
  __syncthreads();
  if (warp == 0) {
    EvictBest mine = {EVICT_INF, EVICT_NO_ROW};
    if (lane < warps) {
      mine = partial[lane];
    }
    mine = evict_warp_best(mine);
    if (lane == 0) {
      gone[group] = mine.row;
    }
  }
}

// Where one thread of the compaction stands: a group, an output row, the row it comes from, and a pair of elements.
struct EvictPlace {
  int pair;
  size_t from;
  size_t to;
  bool moved;
  bool inside;  // the grid is rounded up to whole blocks
};

// A thread is (row * pairs + pair, group). dims: rows before, key size, value size, pairs of a row.
template <bool RENUMBER>
__device__ inline EvictPlace evict_place(const int* gone, const int* positions, const int* dims) {
  const int n = dims[0], pairs = dims[3], group = blockIdx.y, out = gone[group];
  const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = thread / pairs;
  if (row >= n - 1) {
    return {0, 0, 0, false, false};
  }
  const size_t base = (size_t)group * n;
  const size_t from = base + row + (row >= out ? 1 : 0);
  const bool moved = RENUMBER && positions[from] > positions[base + out];
  return {(int)(thread % pairs), from, (size_t)group * (n - 1) + row, moved, true};
}

// The pair (i, i + half) of a row, as it is; an odd width has no second element in its last pair.
template <typename T>
__device__ inline void evict_copy(const T* in, T* out, size_t from, size_t to, int width, int i) {
  const int half_width = (width + 1) / 2;
  if (i < half_width) {
    out[to * width + i] = in[from * width + i];
    if (i + half_width < width) {
      out[to * width + i + half_width] = in[from * width + i + half_width];
    }
  }
}

// A pair of a key: turned back by one position if its row has moved up. float32 without contraction, one rounding.
template <typename T>
__device__ inline void evict_key(const T* in, T* out, const float* table, EvictPlace at, int width) {
  if (!at.moved) {
    evict_copy(in, out, at.from, at.to, width, at.pair);
    return;
  }
  const int half_width = width / 2;
  if (at.pair < half_width) {
    const float x1 = (float)in[at.from * width + at.pair], x2 = (float)in[at.from * width + at.pair + half_width];
    const float c = table[at.pair], s = table[half_width + at.pair];
    out[at.to * width + at.pair] = (T)__fadd_rn(__fmul_rn(x1, c), __fmul_rn(x2, s));
    out[at.to * width + at.pair + half_width] = (T)__fsub_rn(__fmul_rn(x2, c), __fmul_rn(x1, s));
  }
}

__device__ inline void evict_position(const int* in, int* out, EvictPlace at) {
  if (at.pair == 0) {
    out[at.to] = in[at.from] - (at.moved ? 1 : 0);
  }
}

__device__ inline void evict_scalar(const float* in, float* out, EvictPlace at) {
  if (at.pair == 0) {
    out[at.to] = in[at.from];
  }
}

__device__ inline float evict_warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(EVICT_ALL, x, offset);
  }
  return x;
}

// Projection of one key on its group's filter, by one warp; protected rows score +inf.
// dims: rows, size, sinks, recent rows, sign.
template <typename T>
__device__ inline void evict_project(const T* keys, const float* filters, const int* dims, float* scores) {
  const int n = dims[0], width = dims[1], group = blockIdx.y, lane = threadIdx.x % 32;
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= n) {  // a whole warp
    return;
  }
  float sum = 0.0f;
  for (int d = lane; d < width; d += 32) {
    sum += (float)keys[((size_t)group * n + row) * width + d] * filters[(size_t)group * width + d];
  }
  sum = evict_warp_sum(sum);
  if (lane == 0) {
    const bool is_protected = row < dims[2] || row >= n - dims[3];
    scores[(size_t)group * n + row] = is_protected ? EVICT_INF : (float)dims[4] * sum;
  }
}

// 2: above the threshold or protected, kept; 1: equal to it, kept as far as the budget goes; 0: out.
__device__ inline int evict_class(const float* scores, float threshold, const int* dims, int group, int row) {
  if (row < dims[1] || row >= dims[0] - dims[2]) {
    return 2;
  }
  const float rank = evict_rank(scores[(size_t)group * dims[0] + row]);
  return rank > threshold ? 2 : (rank == threshold ? 1 : 0);
}

// Rows kept of one group, ascending: all above the threshold, and of those equal to it the last ones. One warp per group.
// dims: rows, sinks, recent rows, budget.
__device__ inline void evict_keep(const float* scores, const float* thresholds, const int* dims, int* kept) {
  const int n = dims[0], budget = dims[3], group = blockIdx.y, lane = threadIdx.x % 32;
  const unsigned int before = (1u << lane) - 1u;
  const float threshold = thresholds[group];
  int above = 0, equal = 0;
  for (int start = 0; start < n; start += 32) {
    const int row = start + lane;
    const int c = row < n ? evict_class(scores, threshold, dims, group, row) : 0;
    above += __popc(__ballot_sync(EVICT_ALL, c == 2));
    equal += __popc(__ballot_sync(EVICT_ALL, c == 1));
  }
  int skip = equal - (budget - above);  // so many of the equal rows, from the front, go
  int written = 0;
  for (int start = 0; start < n; start += 32) {
    const int row = start + lane;
    const int c = row < n ? evict_class(scores, threshold, dims, group, row) : 0;
    const unsigned int equals = __ballot_sync(EVICT_ALL, c == 1);
    const bool keep = c == 2 || (c == 1 && __popc(equals & before) >= skip);
    const unsigned int keeps = __ballot_sync(EVICT_ALL, keep);
    const int place = written + __popc(keeps & before);
    if (keep && place < budget) {
      kept[(size_t)group * budget + place] = row;
    }
    skip -= __popc(equals);
    written += __popc(keeps);
  }
}

// dims: rows before, key size, value size, pairs of a row, rows kept.
__device__ inline EvictPlace evict_gather_place(const int* kept, const int* dims) {
  const unsigned int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = thread / dims[3];
  if (row >= dims[4]) {
    return {0, 0, 0, false, false};
  }
  const size_t to = (size_t)blockIdx.y * dims[4] + row;
  return {(int)(thread % dims[3]), (size_t)blockIdx.y * dims[0] + kept[to], to, false, true};
}

}  // namespace kvtool
