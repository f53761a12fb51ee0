// Attention of a few queries to rows as a live cache holds them, templated on how keys and values are stored (coded_rows.cu).
//
// A row takes LANES lanes of a SIMD-group, 16 channels each: 8 of the first half and the 8 that stand D / 2 further on, so that the pairs of RoPE
// meet in a lane. 32 / LANES rows are scored at once. Keys stored before RoPE are rotated in registers: first, where the codec had turned
// them by R = T diag(signs), by a Walsh-Hadamard transform (signs and 1 / sqrt(D) are the query's), then by the angles of their position.
//
//     s[i, j] = q[i] . k^[j]           in log2: the query carries scale log2(e)
//     out[i]  = sum_j 2^(s - m) v_scale[j] v^[j] / l + (sum_j 2^(s - m) centred[j] / l) v_mean
//
// A threadgroup owns RB query rows of one KV head and one split of the rows; its NSG SIMD-groups take every NSG-th chunk of 32 rows, counted from the
// first row that is stored, so that groups of 32 tokens are not torn. Parts merge as in attend.cu, which comes before; coded_rows.cu too.

namespace kvtool {

constant constexpr int CODED_E = 16;
constant constexpr int CODED_CHUNK = 32;
constant constexpr int CODED_TILE = 2;  // rows of a lane whose sums are rescaled once, at most

// Where the sizes stand in `dims`.
enum CodedDims {
  CODED_QUERIES,      // query rows of a KV head
  CODED_COUNT,        // rows attended to
  CODED_SPLITS,
  CODED_KEYS_FROM,    // first of them among the stored keys
  CODED_KEYS,         // stored keys
  CODED_VALUES_FROM,
  CODED_VALUES,
  CODED_MASK_HEADS,   // heads of the mask: 1 or all
};

// The channel of element e of lane c of a row; `turned`: after coded_hadamard, which swaps the lane's bits with those of e.
template <int D, int LANES>
METAL_FUNC int coded_channel(int c, int e, bool turned) {
  constexpr int SWAPPED = (LANES < 8 ? LANES : 8) - 1;
  const int r = e % 8;
  const int lane = turned ? (c & ~SWAPPED) | (r & SWAPPED) : c;
  const int place = turned ? (r & ~SWAPPED) | (c & SWAPPED) : r;
  return e / 8 * (D / 2) + 8 * lane + place;
}

// Walsh-Hadamard transform of a row over its lanes, not normalised. Of two lanes each gives away half of its elements and transforms
// the other half, so that a stage over lanes takes 8 shuffles; channels change places (coded_channel).
template <int LANES>
METAL_FUNC void coded_hadamard(thread float* x, int c) {
  ATTEND_UNROLL
  for (int step = 1; step < CODED_E; step *= 2) {
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      if ((e & step) == 0) {
        const float a = x[e];
        const float b = x[e + step];
        x[e] = a + b;
        x[e + step] = a - b;
      }
    }
  }
  ATTEND_UNROLL
  for (int step = 1; step < LANES; step *= 2) {
    const bool upper = (c & step) != 0;
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      if (step > 4) {
        const float other = simd_shuffle_xor(x[e], ushort(step));
        x[e] = upper ? other - x[e] : x[e] + other;
      } else if ((e & step) == 0) {
        const float mine = upper ? x[e + step] : x[e];
        const float theirs = simd_shuffle_xor(upper ? x[e] : x[e + step], ushort(step));
        x[e] = mine + theirs;
        x[e + step] = upper ? theirs - mine : mine - theirs;
      }
    }
  }
}

// The running softmax of one query row in one lane, and the weight of rows that have the mean.
struct CodedState {
  AttendState<CODED_E> sums;
  float centred;

  METAL_FUNC void scale(float factor) {
    sums.scale(factor);
    centred *= factor;
  }

  METAL_FUNC void raise(float top) {
    if (top > sums.m) {
      scale(attend_factor(sums.m, top));
      sums.m = top;
    }
  }

  // Add a value of weight 2^s, s at most m; a score of -inf adds nothing.
  METAL_FUNC void add(float s, float factor, float with_mean, const thread float* v) {
    if (s == -INFINITY) {
      return;
    }
    const float p = metal::precise::exp2(s - sums.m);
    sums.l += p;
    centred = metal::fma(p, with_mean, centred);
    const float w = p * factor;
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      sums.o[e] = metal::fma(w, v[e], sums.o[e]);
    }
  }
};

METAL_FUNC bool coded_seen(bool mask, thread float&) {
  return mask;
}
METAL_FUNC bool coded_seen(float mask, thread float& s) {
  s = metal::fma(mask, ATTEND_LOG2E, s);
  return true;
}

// Whether keys are scores that are there already, and one of them; coded_rows.metal has those that are.
template <typename Keys>
METAL_FUNC bool coded_scored(const thread Keys&) {
  return false;
}
template <typename Keys>
METAL_FUNC float coded_score(const thread Keys&, size_t, int, int) {
  return 0;
}

// pool: NSG / 2 * RB * (LANES * 16 + 3) floats, at least one.
template <
    int D, int LANES, int RB, int NSG, bool TURN, bool ROPE, bool MASKED, typename Keys, typename Values, typename M>
METAL_FUNC void coded_attend(
    const device float* q,
    const device float* angles,
    const device float* pair_signs,
    const device M* mask,
    const device int* dims,
    device float* out,
    device float* lse,
    Keys keys,
    Values values,
    threadgroup float* pool,
    uint group,
    uint split,
    uint sg,
    uint lane) {
  constexpr int TOGETHER = 32 / LANES;
  constexpr int TILE = TOGETHER * CODED_TILE > CODED_CHUNK ? 1 : CODED_TILE;
  const int queries = dims[CODED_QUERIES];
  const int count = dims[CODED_COUNT];
  const int splits = dims[CODED_SPLITS];
  const int blocks = (queries + RB - 1) / RB;
  const int block = int(group) % blocks;
  const int head = int(group) / blocks;
  const int slot = int(lane) / LANES;
  const int c = int(lane) % LANES;
  const bool used = 8 * c < D / 2;  // a lane beyond the row has zeros

  float query[RB][CODED_E];
  CodedState state[RB];
  size_t mask_row[RB];
  ATTEND_UNROLL
  for (int x = 0; x < RB; x++) {
    const int row = metal::min(block * RB + x, queries - 1);
    const device float* from = q + (size_t(head) * queries + row) * D;
    ATTEND_UNROLL
    for (int e = 0; e < CODED_E; e++) {
      query[x][e] = used ? from[coded_channel<D, LANES>(c, e, TURN)] : 0.0f;
    }
    state[x].sums.clear();
    state[x].centred = 0;
    mask_row[x] = (size_t(dims[CODED_MASK_HEADS] > 1 ? head : 0) * queries + row) * count;
  }
  float sign[8];
  ATTEND_UNROLL
  for (int r = 0; r < 8; r++) {
    sign[r] = TURN ? pair_signs[coded_channel<D, LANES>(c, r, true)] : 1.0f;
  }

  const int start = dims[CODED_KEYS_FROM];
  const int shift = dims[CODED_VALUES_FROM] - start;
  const int first = start / CODED_CHUNK;
  const int chunks = (start + count + CODED_CHUNK - 1) / CODED_CHUNK - first;
  const int each = (chunks + splits - 1) / splits;
  const int stop = first + metal::min(each * (int(split) + 1), chunks);
  for (int chunk = first + each * int(split) + int(sg); chunk < stop; chunk += NSG) {
    for (int base = chunk * CODED_CHUNK; base < (chunk + 1) * CODED_CHUNK; base += TOGETHER * TILE) {
      if (base + TOGETHER * TILE <= start || base >= start + count) {
        continue;  // the same for all lanes
      }
      typename Keys::Stored key[TILE];
      typename Values::Stored value[TILE];
      int at[TILE];
      bool in[TILE];
      ATTEND_UNROLL
      for (int t = 0; t < TILE; t++) {
        const int j = base + t * TOGETHER + slot;
        in[t] = j >= start && j < start + count;
        at[t] = metal::min(metal::max(j, start), start + count - 1);
        keys.fetch(key[t], head, dims[CODED_KEYS], at[t], c, used);
        values.fetch(value[t], head, dims[CODED_VALUES], at[t] + shift, c, used);
      }
      float s[TILE][RB];
      ATTEND_UNROLL
      for (int t = 0; t < TILE; t++) {
        if (coded_scored(keys)) {
          ATTEND_UNROLL
          for (int y = 0; y < RB; y++) {
            const size_t row = size_t(head) * queries + metal::min(block * RB + y, queries - 1);
            s[t][y] = in[t] ? coded_score(keys, row, count, at[t] - start) : -INFINITY;
          }
          continue;
        }
        float x[CODED_E] = {};
        keys.build(x, key[t], head, c, used);
        if (TURN) {
          coded_hadamard<LANES>(x, c);
        }
        if (ROPE) {
          const device float* turn = angles + size_t(at[t] - start) * D;
          ATTEND_UNROLL
          for (int r = 0; r < 8; r++) {
            const int i = used ? coded_channel<D, LANES>(c, r, TURN) : 0;
            const float cosine = turn[i];
            const float sine = turn[D / 2 + i] * sign[r];
            const float a = x[r];
            const float b = x[r + 8];
            x[r] = metal::fma(cosine, a, -sine * b);
            x[r + 8] = metal::fma(cosine, b, sine * a);
          }
        }
        const float norm = keys.norm(key[t]);
        ATTEND_UNROLL
        for (int y = 0; y < RB; y++) {
          float sum = 0;
          ATTEND_UNROLL
          for (int e = 0; e < CODED_E; e++) {
            sum = metal::fma(query[y][e], x[e], sum);
          }
          ATTEND_UNROLL
          for (int offset = LANES / 2; offset > 0; offset /= 2) {
            sum += simd_shuffle_xor(sum, ushort(offset));
          }
          sum *= norm;
          const bool seen = in[t] && (!MASKED || coded_seen(mask[mask_row[y] + (at[t] - start)], sum));
          s[t][y] = seen ? sum : -INFINITY;
        }
      }
      ATTEND_UNROLL
      for (int y = 0; y < RB; y++) {
        float top = state[y].sums.m;
        ATTEND_UNROLL
        for (int t = 0; t < TILE; t++) {
          top = s[t][y] > top ? s[t][y] : top;  // a NaN is no maximum
        }
        state[y].raise(top);
      }
      ATTEND_UNROLL
      for (int t = 0; t < TILE; t++) {
        float v[CODED_E];
        values.build(v, value[t], head, c, used);
        const float factor = values.norm(value[t]);
        const float with_mean = values.centred(value[t]);
        ATTEND_UNROLL
        for (int y = 0; y < RB; y++) {
          state[y].add(s[t][y], factor, with_mean, v);
        }
      }
    }
  }

  // The rows that were scored at once.
  ATTEND_UNROLL
  for (int offset = LANES; offset < 32; offset *= 2) {
    ATTEND_UNROLL
    for (int x = 0; x < RB; x++) {
      thread AttendState<CODED_E>& sums = state[x].sums;
      const float m = simd_shuffle_xor(sums.m, ushort(offset));
      const float top = metal::max(m, sums.m);
      state[x].scale(attend_factor(sums.m, top));
      sums.l += simd_shuffle_xor(sums.l, ushort(offset));
      state[x].centred += simd_shuffle_xor(state[x].centred, ushort(offset));
      ATTEND_UNROLL
      for (int e = 0; e < CODED_E; e++) {
        sums.o[e] += simd_shuffle_xor(sums.o[e], ushort(offset));
      }
      sums.m = top;
    }
  }

  // The SIMD-groups: the upper half hands over to the lower one until one is left.
  constexpr int STRIDE = LANES * CODED_E + 3;
  for (int active = NSG; active > 1; active = (active + 1) / 2) {
    const int keep = (active + 1) / 2;
    if (int(sg) >= keep && int(sg) < active && slot == 0) {
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        threadgroup float* place = pool + ((int(sg) - keep) * RB + x) * STRIDE;
        if (lane == 0) {
          place[0] = state[x].sums.m;
          place[1] = state[x].sums.l;
          place[2] = state[x].centred;
        }
        ATTEND_UNROLL
        for (int e = 0; e < CODED_E; e++) {
          place[3 + e * LANES + c] = state[x].sums.o[e];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(sg) < active - keep && slot == 0) {
      ATTEND_UNROLL
      for (int x = 0; x < RB; x++) {
        const threadgroup float* place = pool + (int(sg) * RB + x) * STRIDE;
        const float m = place[0];
        const float top = metal::max(m, state[x].sums.m);
        const float theirs = attend_factor(m, top);
        state[x].scale(attend_factor(state[x].sums.m, top));
        state[x].sums.l += theirs * place[1];
        state[x].centred += theirs * place[2];
        ATTEND_UNROLL
        for (int e = 0; e < CODED_E; e++) {
          state[x].sums.o[e] += theirs * place[3 + e * LANES + c];
        }
        state[x].sums.m = top;
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
    if (row >= queries) {
      return;
    }
    const size_t index = (size_t(head) * queries + row) * splits + split;
    const float l = state[x].sums.l;
    const bool none = l == 0;
    if (lane == 0) {
      lse[index] = none ? -INFINITY : state[x].sums.m * ATTEND_LN2 + metal::precise::log(l);
    }
    if (used) {
      ATTEND_UNROLL
      for (int e = 0; e < CODED_E; e++) {
        const int d = coded_channel<D, LANES>(c, e, false);
        const float sum = state[x].sums.o[e] + values.mean_part(state[x].centred, head, d);
        out[index * D + d] = none ? 0.0f : sum / l;
      }
    }
  }
}

}  // namespace kvtool
