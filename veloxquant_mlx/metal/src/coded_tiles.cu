// The kernel of coded_parts.cu, over its keys and values.

namespace kvtool {

template <int HB, typename Keys, typename Values>
__device__ __forceinline__ void coded_tiles(const float* q, const int* dims, float* out, float* lse, Keys keys, Values values) {
  const int warp = int(threadIdx.x) / 32;
  const DecodeLane at(int(threadIdx.x) % 32);
  const int queries = dims[CODED_QUERIES];
  const int count = dims[CODED_COUNT];
  const int splits = dims[CODED_SPLITS];
  const int blocks = (queries + TILE_QUERIES - 1) / TILE_QUERIES;
  const int block = int(blockIdx.x) % blocks;
  const int head = int(blockIdx.x) / blocks * HB + warp % HB;
  const int split = int(blockIdx.y) * (TILE_WARPS / HB) + warp / HB;
  const int start = dims[CODED_KEYS_FROM];
  const int shift = dims[CODED_VALUES_FROM] - start;
  const int last = start + count - 1;
  const int present = min(TILE_QUERIES, queries - block * TILE_QUERIES);
  const size_t query0 = size_t(head) * queries + block * TILE_QUERIES;

  keys.prepare();
  values.prepare();
  __syncthreads();
  keys.begin(q + (query0 + min(at.g % 4, present - 1)) * TILE_DIM, head, at);

  const int first = start / TILE_ROWS;
  const int tiles = last / TILE_ROWS + 1 - first;
  const int each = (tiles + splits - 1) / splits;
  const int stop = first + min(each * (split + 1), tiles);
  const auto clamp = [&](int j) { return min(max(j, start), last); };
  const auto load_keys = [&](int tile) {
    const int rows[2] = {clamp(tile * TILE_ROWS + at.g), clamp(tile * TILE_ROWS + at.g + 8)};
    keys.load(head, dims[CODED_KEYS], rows, at);
  };
  const auto load_values = [&](int tile) {
    const int base = tile * TILE_ROWS;
    const int own[2] = {clamp(base + at.g) + shift, clamp(base + at.g + 8) + shift};
    int rows[4];
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      rows[i] = clamp(base + 2 * at.t + i % 2 + 8 * (i / 2)) + shift;
    }
    values.load(head, dims[CODED_VALUES], rows, own, at);
  };
  TileState state;
  state.clear();
  int tile = first + each * split;
  if (tile < stop) {
    load_keys(tile);
    load_values(tile);
  }
  for (; tile < stop; tile++) {
    const int base = tile * TILE_ROWS;
    const int from_start[2] = {clamp(base + at.g) - start, clamp(base + at.g + 8) - start};
    float s[2][2];
    keys.dots(s, from_start, at, [&] {
      if (tile + 1 < stop) {
        load_keys(tile + 1);
      }
    });
    if (base < start || base + TILE_ROWS > start + count) {
      ATTEND_UNROLL
      for (int r = 0; r < 2; r++) {
        const int j = base + at.g + 8 * r;
        if (j < start || j > last) {
          s[r][0] = s[r][1] = -ATTEND_INF;
        }
      }
    }
    state.weigh(s);
    values.add(state, s, at);
    if (tile + 1 < stop) {
      load_values(tile + 1);
    }
  }

  ATTEND_UNROLL
  for (int x = 0; x < 2; x++) {
    ATTEND_UNROLL
    for (int offset = 4; offset < 32; offset *= 2) {
      state.l[x] += __shfl_xor_sync(0xffffffffu, state.l[x], offset);
      state.centred[x] += __shfl_xor_sync(0xffffffffu, state.centred[x], offset);
      ATTEND_UNROLL
      for (int c = 0; c < 4; c++) {
        state.zero[x][c] += __shfl_xor_sync(0xffffffffu, state.zero[x][c], offset);
      }
    }
    const int own = at.t % 2 * 2 + x;
    const bool none = state.l[x] == 0;
    const size_t index = (query0 + own) * splits + split;
    if (at.g == 0 && at.t < 2 && own < present) {
      lse[index] = none ? -ATTEND_INF : (state.m[x] - DECODE_LIFT) * ATTEND_LN2 + logf(state.l[x]);
    }
    ATTEND_UNROLL
    for (int i = 0; i < 8; i++) {
      ATTEND_UNROLL
      for (int k = 0; k < 2; k++) {
        const float part = state.o[i][2 * k + x];
        const float sum = tile_whole(part) * values.factor();
        const int d = Values::channel(i, k, at);
        if (at.t < 2 && own < present) {
          out[index * TILE_DIM + d] = none ? 0.0f : (sum + values.constant(state, x, i, head, d)) / state.l[x];
        }
      }
    }
  }
}

}  // namespace kvtool
