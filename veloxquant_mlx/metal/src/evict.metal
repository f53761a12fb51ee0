// Eviction of rows from a full cache: choose a row, or a set of rows, and close the gaps. Rows are (group, row, element).

namespace kvtool {

// NaN never ranks as the smallest.
METAL_FUNC float evict_rank(float x) {
  return isnan(x) ? INFINITY : x;
}

// What a row is ranked by: score + tau * gumbel in two roundings, as the reference has it; without noise the score alone.
template <bool NOISE>
METAL_FUNC float evict_selection(const device float* scores, const device float* gumbel, float tau, size_t i) {
#pragma METAL fp contract(off)
  if (!NOISE) {
    return evict_rank(scores[i]);
  }
  const float noise = tau * gumbel[i];
  return evict_rank(scores[i] + noise);
}

struct EvictBest {
  float value;
  int row;
};

// The better of each lane's candidate over the SIMD-group: smallest value, then lowest row. A lane without one has (inf, INT_MAX).
METAL_FUNC EvictBest evict_simd_best(EvictBest mine) {
  const float value = simd_min(mine.value);
  return {value, simd_min(mine.value == value ? mine.row : INT_MAX)};
}

// Row of the smallest selection in rows [first, stop) of one group; the threadgroup works on it together.
template <bool NOISE>
METAL_FUNC void evict_lowest(
    const device float* scores, const device float* gumbel, const device float* tau, const device int* dims, device int* gone,
    threadgroup float* values, threadgroup int* rows, uint group, uint thread_index, uint threads, uint lane, uint simd, uint simds) {
  const int n = dims[0], first = dims[1], stop = dims[2];
  EvictBest best = {INFINITY, INT_MAX};
  for (int row = first + int(thread_index); row < stop; row += int(threads)) {
    const float value = evict_selection<NOISE>(scores, gumbel, tau[0], size_t(group) * n + row);
    if (best.row == INT_MAX || value < best.value) {
      best = {value, row};
    }
  }
  best = evict_simd_best(best);
  if (lane == 0) {
    values[simd] = best.value;
    rows[simd] = best.row;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0) {
    EvictBest mine = {INFINITY, INT_MAX};
    if (lane < simds) {
      mine = {values[lane], rows[lane]};
    }
    mine = evict_simd_best(mine);
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
};

// A thread is (row * pairs + pair, group). dims: rows before, key size, value size, pairs of a row.
template <bool RENUMBER>
METAL_FUNC EvictPlace evict_place(const device int* gone, const device int* positions, const device int* dims, uint3 thread_at) {
  const int n = dims[0], pairs = dims[3], out = gone[thread_at.y];
  const int row = int(thread_at.x) / pairs;
  const size_t base = size_t(thread_at.y) * n;
  const size_t from = base + row + (row >= out ? 1 : 0);
  const bool moved = RENUMBER && positions[from] > positions[base + out];
  return {int(thread_at.x) % pairs, from, size_t(thread_at.y) * (n - 1) + row, moved};
}

// The pair (i, i + half) of a row, as it is; an odd width has no second element in its last pair.
template <typename T>
METAL_FUNC void evict_copy(const device T* in, device T* out, size_t from, size_t to, int width, int i) {
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
METAL_FUNC void evict_key(const device T* in, device T* out, const device float* table, EvictPlace at, int width) {
#pragma METAL fp contract(off)
  if (!at.moved) {
    evict_copy(in, out, at.from, at.to, width, at.pair);
    return;
  }
  const int half_width = width / 2;
  if (at.pair < half_width) {
    const float x1 = float(in[at.from * width + at.pair]), x2 = float(in[at.from * width + at.pair + half_width]);
    const float c = table[at.pair], s = table[half_width + at.pair];
    const float a = x1 * c, b = x2 * s, d = x2 * c, e = x1 * s;
    out[at.to * width + at.pair] = T(a + b);
    out[at.to * width + at.pair + half_width] = T(d - e);
  }
}

METAL_FUNC void evict_position(const device int* in, device int* out, EvictPlace at) {
  if (at.pair == 0) {
    out[at.to] = in[at.from] - (at.moved ? 1 : 0);
  }
}

METAL_FUNC void evict_scalar(const device float* in, device float* out, EvictPlace at) {
  if (at.pair == 0) {
    out[at.to] = in[at.from];
  }
}

// Projection of one key on its group's filter, by one SIMD-group; protected rows score +inf.
// dims: rows, size, sinks, recent rows, sign.
template <typename T>
METAL_FUNC void evict_project(
    const device T* keys, const device float* filters, const device int* dims, device float* scores, uint group, uint row, uint lane) {
  const int n = dims[0], width = dims[1];
  float sum = 0.0f;
  for (int d = int(lane); d < width; d += 32) {
    sum += float(keys[(size_t(group) * n + row) * width + d]) * filters[size_t(group) * width + d];
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    const bool is_protected = int(row) < dims[2] || int(row) >= n - dims[3];
    scores[size_t(group) * n + row] = is_protected ? INFINITY : float(dims[4]) * sum;
  }
}

// 2: above the threshold or protected, kept; 1: equal to it, kept as far as the budget goes; 0: out.
METAL_FUNC int evict_class(const device float* scores, float threshold, const device int* dims, uint group, int row) {
  if (row < dims[1] || row >= dims[0] - dims[2]) {
    return 2;
  }
  const float rank = evict_rank(scores[size_t(group) * dims[0] + row]);
  return rank > threshold ? 2 : (rank == threshold ? 1 : 0);
}

// Rows kept of one group, ascending: all above the threshold, and of those equal to it the last ones. One SIMD-group per group.
// dims: rows, sinks, recent rows, budget.
METAL_FUNC void evict_keep(
    const device float* scores, const device float* thresholds, const device int* dims, device int* kept, uint group, uint lane) {
  const int n = dims[0], budget = dims[3];
  const float threshold = thresholds[group];
  int above = 0, equal = 0;
  for (int row = int(lane); row < n; row += 32) {
    const int c = evict_class(scores, threshold, dims, group, row);
    above += int(c == 2);
    equal += int(c == 1);
  }
  above = simd_sum(above);
  equal = simd_sum(equal);
  int skip = equal - (budget - above);  // so many of the equal rows, from the front, go
  int written = 0;
  for (int start = 0; start < n; start += 32) {
    const int row = start + int(lane);
    const int c = row < n ? evict_class(scores, threshold, dims, group, row) : 0;
    const int ordinal = simd_prefix_exclusive_sum(int(c == 1));
    const bool keep = c == 2 || (c == 1 && ordinal >= skip);
    const int place = written + simd_prefix_exclusive_sum(int(keep));
    if (keep && place < budget) {
      kept[size_t(group) * budget + place] = row;
    }
    skip -= simd_sum(int(c == 1));
    written += simd_sum(int(keep));
  }
}

// dims: rows before, key size, value size, pairs of a row, rows kept.
METAL_FUNC EvictPlace evict_gather_place(const device int* kept, const device int* dims, uint3 thread_at) {
  const int row = int(thread_at.x) / dims[3];
  const size_t to = size_t(thread_at.y) * dims[4] + row;
  return {int(thread_at.x) % dims[3], size_t(thread_at.y) * dims[0] + kept[to], to, false};
}

}  // namespace kvtool
