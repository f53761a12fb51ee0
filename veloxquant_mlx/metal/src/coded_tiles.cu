// The kernel of coded_parts.cu, over its keys and values.

namespace kvtool {

template <int HB, int WARPS, typename Keys, typename Values, typename Turns>
__device__ __forceinline__ void coded_tiles(
    const float* q, const int* dims, float* out, float* lse, Keys keys, Values values, Turns turns) {
  constexpr bool ROPE = Keys::ORDER > 0;
  const int warp = int(threadIdx.x / 32);
  const DecodeLane at(int(threadIdx.x % 32));
  const int queries = dims[CODED_QUERIES];
  const int count = dims[CODED_COUNT];
  const int splits = dims[CODED_SPLITS];
  const int blocks = (queries + TILE_QUERIES - 1) / TILE_QUERIES;
  const int block = int(blockIdx.x) % blocks;
  const int head = int(blockIdx.x) / blocks * HB + warp % HB;
  const int split = int(blockIdx.y) * (WARPS / HB) + warp / HB;
  const int start = dims[CODED_KEYS_FROM];
  const int last = start + count - 1;
  const int present = min(TILE_QUERIES, queries - block * TILE_QUERIES);
  const size_t query0 = size_t(head) * queries + block * TILE_QUERIES;

  keys.prepare(32 * WARPS);
  values.prepare(32 * WARPS);
  __syncthreads();
  keys.begin(q + (query0 + min(at.g % 4, present - 1)) * TILE_DIM, head, at);

  const int first = start / TILE_ROWS;
  const int tiles = last / TILE_ROWS + 1 - first;
  const int each = (tiles + splits - 1) / splits;
  const int stop = first + min(each * (split + 1), tiles);
  const auto clamp = [&](int j) { return min(max(j, start), last); };
  const int key_rows = dims[CODED_KEYS];
  const size_t key_row = size_t(head) * key_rows;
  const size_t value_row = size_t(head) * dims[CODED_VALUES] + dims[CODED_VALUES_FROM] - start;  // of the value of key row 0
  // Rows of a tile that are all there are at fixed distances; other tiles, and memory that is not aligned, are read by bytes.
  const auto whole = [&](int base) { return base >= start && base + TILE_ROWS <= start + count; };
  const auto load_keys = [&](int tile) {
    const int base = tile * TILE_ROWS;
    const size_t row = key_row + base + at.g;
    if (keys.aligned && whole(base)) {
      const size_t rows[2] = {row, row + 8};
      keys.load(rows, head, key_rows, base, at, true);
    } else {
      const size_t rows[2] = {key_row + clamp(base + at.g), key_row + clamp(base + at.g + 8)};
      keys.load(rows, head, key_rows, base, at, false);
    }
  };
  const auto load_values = [&](int tile) {
    const int base = tile * TILE_ROWS;
    if (values.aligned && whole(base)) {
      const size_t own = value_row + base + at.g;
      const size_t row = value_row + base + 2 * at.t;
      const size_t owns[2] = {own, own + 8};
      const size_t rows[4] = {row, row + 1, row + 8, row + 9};
      values.load(rows, owns, at, true);
    } else {
      const size_t owns[2] = {value_row + clamp(base + at.g), value_row + clamp(base + at.g + 8)};
      size_t rows[4];
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        rows[i] = value_row + clamp(base + 2 * at.t + i % 2 + 8 * (i / 2));
      }
      values.load(rows, owns, at, false);
    }
  };
  TileState state;
  state.clear();
  int tile = first + each * split;
  if (tile < stop) {
    load_keys(tile);
    turns.copy(tile * TILE_ROWS - start, count - 1);
    turns.arrange(tile, tile * TILE_ROWS - start, count - 1);
    if (!ROPE) {
      load_values(tile);
    }
  }
  for (; tile < stop; tile++) {
    const int base = tile * TILE_ROWS;
    const bool more = tile + 1 < stop;
    if (more) {
      turns.copy(base + TILE_ROWS - start, count - 1);
    }
    float s[2][2];
    // Before RoPE a lane holds codes of keys or of values.
    keys.dots(s, turns.of(tile, at), at, [&] {
      if (ROPE) {
        load_values(tile);
      } else if (more) {
        load_keys(tile + 1);
      }
    });
    if (ROPE && more) {
      load_keys(tile + 1);
    }
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
    if (more) {
      turns.arrange(tile + 1, base + TILE_ROWS - start, count - 1);
      if (!ROPE) {
        load_values(tile + 1);
      }
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
    const float inverse = none ? 0.0f : 1.0f / state.l[x];
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
          out[index * TILE_DIM + d] = (sum + values.constant(state, x, i, head, d)) * inverse;
        }
      }
    }
  }
}

}  // namespace kvtool
