// The passes of components.cu on tensor cores: rows of 128 channels. After decode_parts.cu, coded_parts.cu and components.cu.
//
// All products are mma.m16n8k16 on halves with float32 sums. What is no half is the sum of two (x = near + rest, 22 bits): three products
// of near by near, near by rest and rest by near. A warp takes a block of 32 tokens; the words of the next one are on their way meanwhile.
//   scores: tokens by components by channels. RoPE and the products with queries are float32, in registers.
//   sums:   components by tokens by queries.
// Lane = 4 g + t holds rows g, g + 8 and columns 2 t, 2 t + 1 of a product.

namespace kvtool {

constexpr int COMPONENT_COLUMNS = 32;               // of a block
constexpr int COMPONENT_STEPS = TILE_DIM / 16;      // products along the components of a head, at most
constexpr int COMPONENT_POINTS = 4096;              // of all tables, at most
constexpr int COMPONENT_STAGED = 8 * TILE_DIM + 4;  // words of a head's codes, at most, and one behind
constexpr int COMPONENT_BASIS_BYTES = COMPONENT_STEPS * 16 * 32 * 16;

// A number as two halves in a word, near and rest.
__device__ __forceinline__ uint32_t component_halves(float x) {
  uint32_t near;
  uint32_t rest;
  tile_split(x, 0.0f, near, rest);
  return (near & 0xffffu) | rest << 16;
}

// Codes of one head's components in shared memory: points as near and rest, quantisers (first word; bits and first point), and the words of
// two blocks for each warp. `own` is what is left.
struct ComponentStage {
  uint32_t* points;
  uint2* quantisers;
  uint32_t* staged;
  char* own;
  const uint32_t* words;
  int each;   // words of a block, all heads
  int count;  // of them, the head's
  int size;   // components

  // Whoever reads waits for the block.
  __device__ __forceinline__ ComponentStage(ComponentCodes codes, const int* dims, int begin, int stop, int number)
      : each(dims[COMPONENT_WORDS]), count(0), size(stop - begin) {
    const int thread_ = int(threadIdx.x);
    points = reinterpret_cast<uint32_t*>(decode_memory());
    quantisers = reinterpret_cast<uint2*>(points + COMPONENT_POINTS);
    staged = reinterpret_cast<uint32_t*>(quantisers + TILE_DIM);
    own = reinterpret_cast<char*>(staged + 2 * COMPONENT_WARPS * COMPONENT_STAGED);
    staged += thread_ / 32 * 2 * COMPONENT_STAGED;
    int first = 0;
    if (size > 0) {
      first = __ldg(codes.quantisers + 4 * begin);
      const int* last = codes.quantisers + 4 * (stop - 1);
      count = __ldg(last) + __ldg(last + 1) - first;
    }
    words = codes.codes + first;
    for (int i = thread_; i < number; i += COMPONENT_WARPS * 32) {
      points[i] = component_halves(codes.points[i]);
    }
    for (int i = thread_; i < TILE_DIM; i += COMPONENT_WARPS * 32) {  // behind the last component, that one
      const int* from = codes.quantisers + 4 * (size > 0 ? begin + min(i, size - 1) : 0);
      quantisers[i] = make_uint2(0, 0);
      if (size > 0) {
        quantisers[i] = make_uint2(uint32_t(__ldg(from) - first), uint32_t(__ldg(from + 1) | __ldg(from + 2) << 8));
      }
    }
  }

  // Start to copy the words of a block into place 0 or 1, if there is one.
  __device__ __forceinline__ void bring(int block, bool there, int place, int lane) const {
    if (there) {
      const uint32_t* from = words + size_t(block) * each;
      for (int i = lane; i < count; i += 32) {
        decode_copy(staged + place * COMPONENT_STAGED + i, from + i);
      }
    }
    decode_commit();
  }
  __device__ __forceinline__ void arrive() const {
    decode_wait();
  }

  // Points of a block's token `token` and the one APART after.
  template <int APART>
  __device__ __forceinline__ void two(int, int place, uint2 one, int token, uint32_t& x, uint32_t& y) const {
    const uint32_t bits = one.y & 255u;
    const uint32_t mask = (1u << bits) - 1;
    const uint32_t* from = points + (one.y >> 8);
    const uint32_t* codes = staged + place * COMPONENT_STAGED + one.x;
    const uint64_t near = window(codes, uint32_t(token) * bits);
    x = from[uint32_t(near) & mask];
    y = from[uint32_t(APART == 1 ? near >> bits : window(codes, uint32_t(token + APART) * bits)) & mask];
  }

  static __device__ __forceinline__ uint64_t window(const uint32_t* codes, uint32_t bit) {
    const uint32_t* at = codes + bit / 32;
    return (uint64_t(at[1]) << 32 | at[0]) >> (bit % 32);
  }
};

// The same for rows of codes, of 256 points each; codes are read where they are.
struct ComponentRowStage {
  uint32_t* points;
  uint2* quantisers;
  char* own;
  const uint8_t* codes;
  int each;  // bytes of a row
  int last;  // row that is read
  int size;

  __device__ __forceinline__ ComponentRowStage(ComponentRows given, const int* dims, int begin, int stop, int)
      : codes(given.codes), each(dims[COMPONENT_WORDS]), last(dims[COMPONENT_FROM] + dims[COMPONENT_COUNT] - 1), size(stop - begin) {
    const int thread_ = int(threadIdx.x);
    points = reinterpret_cast<uint32_t*>(decode_memory());
    quantisers = reinterpret_cast<uint2*>(points + TILE_DIM * 256);
    own = reinterpret_cast<char*>(quantisers + TILE_DIM);
    for (int i = thread_; i < TILE_DIM * 256; i += COMPONENT_WARPS * 32) {
      points[i] = component_halves(given.points[__ldg(given.quantisers + 4 * (begin + i / 256) + 2) + i % 256]);
    }
    if (thread_ < TILE_DIM) {
      quantisers[thread_] = make_uint2(uint32_t(__ldg(given.quantisers + 4 * (begin + thread_))), uint32_t(thread_) * 256);
    }
  }

  __device__ __forceinline__ const uint8_t* row(int block, int token) const {
    return codes + size_t(min(block * COMPONENT_TOKENS + token, last)) * each;
  }
  __device__ __forceinline__ void bring(int block, bool there, int, int lane) const {
    if (there) {
      decode_prefetch(row(block, lane) + quantisers[0].x);
    }
  }
  __device__ __forceinline__ void arrive() const {}

  template <int APART>
  __device__ __forceinline__ void two(int block, int, uint2 one, int token, uint32_t& x, uint32_t& y) const {
    x = points[one.y + __ldg(row(block, token) + one.x)];
    y = points[one.y + __ldg(row(block, token + APART) + one.x)];
  }
};

// Of two pairs of near and rest: both nears, both rests.
__device__ __forceinline__ void component_pair(uint32_t x, uint32_t y, uint32_t& near, uint32_t& rest) {
  near = __byte_perm(x, y, 0x5410u);
  rest = __byte_perm(x, y, 0x7632u);
}

// The largest of a block's numbers; `room`: a float for each warp.
__device__ __forceinline__ float component_block_largest(float x, float* room) {
  const float own = component_largest(x);
  if (threadIdx.x % 32 == 0) {
    room[threadIdx.x / 32] = own;
  }
  __syncthreads();
  float largest = room[0];
  ATTEND_UNROLL
  for (int w = 1; w < COMPONENT_WARPS; w++) {
    largest = fmaxf(largest, room[w]);
  }
  return largest;
}

// `component_scores`; dims[COMPONENT_TOPS]: points of all tables.
template <typename Stage, bool ROPE, bool MASKED, typename M, typename Codes>
__device__ __forceinline__ void component_tile_scores(
    const float* q,
    const float* angles,
    const M* mask,
    const int* dims,
    const int* first,
    const float* basis,
    float* scores,
    float* tops,
    Codes given) {
  constexpr int D = TILE_DIM;
  const int thread_ = int(threadIdx.x);
  const int warp = thread_ / 32;
  const DecodeLane at(thread_ % 32);
  const int queries = dims[COMPONENT_QUERIES];
  const int blocks = (queries + COMPONENT_COLUMNS - 1) / COMPONENT_COLUMNS;
  const int head = int(blockIdx.x) / blocks;
  const int row0 = int(blockIdx.x) % blocks * COMPONENT_COLUMNS;
  const int rows = min(COMPONENT_COLUMNS, queries - row0);
  const int begin = first[head];
  const Stage codes(given, dims, begin, first[head + 1], dims[COMPONENT_TOPS]);
  const ComponentSpan span(dims, int(blockIdx.y));
  char* own = codes.own;
  uint4* products = reinterpret_cast<uint4*>(own);
  float* query = reinterpret_cast<float*>(own + COMPONENT_BASIS_BYTES);
  float* mean = query + COMPONENT_COLUMNS * D;
  float* top = mean + D;  // a row for each warp
  float* room = top + COMPONENT_WARPS * COMPONENT_COLUMNS;

  const float* back = basis + size_t(begin) * D;
  float largest = 0;
  for (int i = thread_; i < codes.size * D; i += COMPONENT_WARPS * 32) {
    largest = fmaxf(largest, fabsf(back[i]));
  }
  float unit;
  float inverse;
  decode_unit(component_block_largest(largest, room), unit, inverse);
  const auto entry = [&](int i, int d) { return i < codes.size ? back[size_t(i) * D + d] * inverse : 0.0f; };
  for (int i = thread_; i < COMPONENT_STEPS * 16 * 32; i += COMPONENT_WARPS * 32) {
    const DecodeLane to(i % 32);
    const int d = i / 32 % 16 * 8 + to.g;
    const int c = i / 512 * 16 + 2 * to.t;
    uint4 x;
    tile_split(entry(c, d), entry(c + 1, d), x.x, x.z);
    tile_split(entry(c + 8, d), entry(c + 9, d), x.y, x.w);
    products[i] = x;
  }
  for (int i = thread_; i < COMPONENT_COLUMNS * D; i += COMPONENT_WARPS * 32) {
    query[i] = i / D < rows ? q[(size_t(head) * queries + row0) * D + i] : 0.0f;
  }
  if (thread_ < D) {
    mean[thread_] = basis[size_t(dims[COMPONENT_ALL] + head) * D + thread_];
  }
  top[thread_] = -ATTEND_INF;
  const int steps = (codes.size + 15) / 16;
  int block = span.first + warp;
  __syncthreads();
  codes.bring(block, block < span.stop, 0, at.lane);

  for (int place = 0; block < span.stop; block += COMPONENT_WARPS, place ^= 1) {
    codes.bring(block + COMPONENT_WARPS, block + COMPONENT_WARPS < span.stop, place ^ 1, at.lane);
    codes.arrive();
    float x[2][16][4];  // tokens 16 m + g and g + 8, channels 8 j + 2 t and the next
    ATTEND_UNROLL
    for (int i = 0; i < 128; i++) {
      x[i / 64][i / 4 % 16][i % 4] = 0;
    }
    for (int step = 0; step < steps; step++) {
      uint32_t near[2][4];
      uint32_t rest[2][4];
      ATTEND_UNROLL
      for (int half = 0; half < 2; half++) {
        const int c = 16 * step + 8 * half + 2 * at.t;
        const uint2 one[2] = {codes.quantisers[c], codes.quantisers[c + 1]};
        ATTEND_UNROLL
        for (int m = 0; m < 2; m++) {
          uint32_t y[2][2];
          codes.template two<8>(block, place, one[0], 16 * m + at.g, y[0][0], y[1][0]);
          codes.template two<8>(block, place, one[1], 16 * m + at.g, y[0][1], y[1][1]);
          component_pair(y[0][0], y[0][1], near[m][2 * half], rest[m][2 * half]);
          component_pair(y[1][0], y[1][1], near[m][2 * half + 1], rest[m][2 * half + 1]);
        }
      }
      const uint4* from = products + step * 512 + at.lane;
      ATTEND_UNROLL
      for (int j = 0; j < 16; j++) {
        const uint4 b = from[32 * j];
        ATTEND_UNROLL
        for (int m = 0; m < 2; m++) {
          decode_mma(x[m][j], rest[m][0], rest[m][1], rest[m][2], rest[m][3], b.x, b.y);
          decode_mma(x[m][j], near[m][0], near[m][1], near[m][2], near[m][3], b.z, b.w);
          decode_mma(x[m][j], near[m][0], near[m][1], near[m][2], near[m][3], b.x, b.y);
        }
      }
    }
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {  // tokens g + 8 i
      const int place_ = min(max(span.place(block, at.g + 8 * i), 0), span.count - 1);
      const float* turn = angles + size_t(place_) * D + 2 * at.t;
      ATTEND_UNROLL
      for (int j = 0; j < 8; j++) {
        float* a = x[i / 2][j] + i % 2 * 2;
        float* b = x[i / 2][j + 8] + i % 2 * 2;
        const float2 low = *reinterpret_cast<const float2*>(mean + 8 * j + 2 * at.t);
        const float2 high = *reinterpret_cast<const float2*>(mean + 64 + 8 * j + 2 * at.t);
        const float y[2][2] = {
            {fmaf(a[0], unit, low.x), fmaf(b[0], unit, high.x)}, {fmaf(a[1], unit, low.y), fmaf(b[1], unit, high.y)}};
        float2 cosine = make_float2(1, 1);
        float2 sine = make_float2(0, 0);
        if (ROPE) {
          cosine = __ldg(reinterpret_cast<const float2*>(turn + 8 * j));
          sine = __ldg(reinterpret_cast<const float2*>(turn + 64 + 8 * j));
        }
        a[0] = fmaf(cosine.x, y[0][0], -sine.x * y[0][1]);
        b[0] = fmaf(cosine.x, y[0][1], sine.x * y[0][0]);
        a[1] = fmaf(cosine.y, y[1][0], -sine.y * y[1][1]);
        b[1] = fmaf(cosine.y, y[1][1], sine.y * y[1][0]);
      }
    }
    for (int r = 0; r < rows; r += 4) {
      float s[4][4] = {};  // tokens, queries
      ATTEND_UNROLL
      for (int j = 0; j < 16; j++) {
        ATTEND_UNROLL
        for (int k = 0; k < 4; k++) {
          const float2 w = *reinterpret_cast<const float2*>(query + (r + k) * D + 8 * j + 2 * at.t);
          ATTEND_UNROLL
          for (int i = 0; i < 4; i++) {
            s[i][k] = fmaf(w.x, x[i / 2][j][i % 2 * 2], fmaf(w.y, x[i / 2][j][i % 2 * 2 + 1], s[i][k]));
          }
        }
      }
      ATTEND_UNROLL
      for (int i = 0; i < 16; i++) {
        float& sum = s[i / 4][i % 4];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      }
      const int row = r + at.t;  // a lane writes one query's
      float highest = -ATTEND_INF;
      ATTEND_UNROLL
      for (int i = 0; i < 4; i++) {
        const int to = span.place(block, at.g + 8 * i);
        float sum = at.t < 2 ? (at.t == 0 ? s[i][0] : s[i][1]) : (at.t == 2 ? s[i][2] : s[i][3]);
        if (row < rows && span.has(to)) {
          const size_t masked = size_t(dims[COMPONENT_MASK_HEADS] > 1 ? head : 0) * queries + row0 + row;
          const bool seen = !MASKED || coded_seen(mask[masked * span.count + to], sum);
          sum = seen ? sum : -ATTEND_INF;
          scores[(size_t(head) * queries + row0 + row) * span.count + to] = sum;
          highest = fmaxf(highest, sum);
        }
      }
      ATTEND_UNROLL
      for (int offset = 4; offset < 32; offset *= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, offset));
      }
      if (at.g == 0) {
        top[warp * COMPONENT_COLUMNS + row] = fmaxf(top[warp * COMPONENT_COLUMNS + row], highest);
      }
    }
    __syncwarp();  // the words of this block are read
  }
  __syncthreads();
  if (thread_ < rows) {
    float highest = -ATTEND_INF;
    for (int w = 0; w < COMPONENT_WARPS; w++) {
      highest = fmaxf(highest, top[w * COMPONENT_COLUMNS + thread_]);
    }
    tops[(size_t(head) * queries + row0 + thread_) * dims[COMPONENT_SPLITS] + blockIdx.y] = highest;
  }
}

// `component_sums` for up to 8 COLUMNS queries; dims[COMPONENT_TOPS + 1]: points of all tables.
template <bool OWN, int COLUMNS>
__device__ __forceinline__ void component_tile_sums(
    const float* scores,
    const float* tops,
    const int* dims,
    const int* first,
    float* sums,
    float* totals,
    ComponentCodes given,
    ComponentSizes sizes) {
  constexpr int D = TILE_DIM;
  const int thread_ = int(threadIdx.x);
  const int warp = thread_ / 32;
  const DecodeLane at(thread_ % 32);
  const int heads = dims[COMPONENT_HEADS];
  const int every = dims[COMPONENT_QUERIES] * heads;
  const int queries = OWN ? dims[COMPONENT_QUERIES] : every;
  const int blocks = (queries + 8 * COLUMNS - 1) / (8 * COLUMNS);
  const int head = int(blockIdx.x) / blocks;
  const int row0 = int(blockIdx.x) % blocks * 8 * COLUMNS;
  const int rows = min(8 * COLUMNS, queries - row0);
  const size_t row1 = size_t(OWN ? head * queries : 0) + row0;
  const int begin = first[head];
  const ComponentStage codes(given, dims, begin, first[head + 1], dims[COMPONENT_TOPS + 1]);
  const ComponentSpan span(dims, int(blockIdx.y));
  float unit = 1;
  float inverse = 1;
  if (OWN) {
    decode_unit(component_largest(fmaxf(sizes.sizes[head * 64 + at.lane], sizes.sizes[head * 64 + 32 + at.lane])), unit, inverse);
  }
  float base[COLUMNS];
  float total[COLUMNS];
  const float* score[COLUMNS];
  ATTEND_UNROLL
  for (int n = 0; n < COLUMNS; n++) {
    const int row = min(8 * n + at.g, rows - 1);
    base[n] = component_top(tops, row1 + row, dims[COMPONENT_TOPS]) - DECODE_LIFT;
    score[n] = scores + (row1 + row) * span.count;
    total[n] = 0;
  }
  float sum[COMPONENT_STEPS][COLUMNS][4];  // components 16 m + g and g + 8, queries 8 n + 2 t and the next
  ATTEND_UNROLL
  for (int i = 0; i < COMPONENT_STEPS * COLUMNS * 4; i++) {
    sum[i / (COLUMNS * 4)][i / 4 % COLUMNS][i % 4] = 0;
  }
  float next[COLUMNS][4];  // scores of the next 16 tokens: 2 t, 2 t + 1, 2 t + 8, 2 t + 9
  float size[4];
  const auto load = [&](int block, int half) {
    ATTEND_UNROLL
    for (int i = 0; i < 4; i++) {
      const int token = 16 * half + 2 * at.t + i % 2 + 8 * (i / 2);
      const int place = span.place(block, token);
      ATTEND_UNROLL
      for (int n = 0; n < COLUMNS; n++) {
        next[n][i] = span.has(place) ? __ldg(score[n] + place) : -ATTEND_INF;
      }
      size[i] = OWN ? sizes.at(head, heads, block, token) * inverse : 1.0f;
    }
  };
  int block = span.first + warp;
  codes.bring(block, block < span.stop, 0, at.lane);
  if (block < span.stop) {
    load(block, 0);
  }
  __syncthreads();
  const int steps = (codes.size + 15) / 16;
  for (int place = 0; block < span.stop; block += COMPONENT_WARPS, place ^= 1) {
    codes.bring(block + COMPONENT_WARPS, block + COMPONENT_WARPS < span.stop, place ^ 1, at.lane);
    codes.arrive();
    ATTEND_UNROLL
    for (int half = 0; half < 2; half++) {
      uint32_t near[COLUMNS][2];
      uint32_t rest[COLUMNS][2];
      ATTEND_UNROLL
      for (int n = 0; n < COLUMNS; n++) {
        float w[4];
        ATTEND_UNROLL
        for (int i = 0; i < 4; i++) {
          w[i] = decode_exp2(next[n][i] - base[n]);
          total[n] += w[i];
          w[i] *= size[i];
        }
        tile_split(w[0], w[1], near[n][0], rest[n][0]);
        tile_split(w[2], w[3], near[n][1], rest[n][1]);
      }
      if (half == 0) {
        load(block, 1);
      } else if (block + COMPONENT_WARPS < span.stop) {
        load(block + COMPONENT_WARPS, 0);
      }
      ATTEND_UNROLL
      for (int m = 0; m < COMPONENT_STEPS; m++) {
        if (m >= steps) {
          break;
        }
        uint32_t a[4];
        uint32_t b[4];
        ATTEND_UNROLL
        for (int i = 0; i < 4; i++) {  // component g or g + 8, tokens from 2 t or 2 t + 8 on
          uint32_t y[2];
          codes.template two<1>(
              block, place, codes.quantisers[16 * m + at.g + 8 * (i % 2)], 16 * half + 8 * (i / 2) + 2 * at.t, y[0], y[1]);
          component_pair(y[0], y[1], a[i], b[i]);
        }
        ATTEND_UNROLL
        for (int n = 0; n < COLUMNS; n++) {
          decode_mma(sum[m][n], b[0], b[1], b[2], b[3], near[n][0], near[n][1]);
          decode_mma(sum[m][n], a[0], a[1], a[2], a[3], rest[n][0], rest[n][1]);
          decode_mma(sum[m][n], a[0], a[1], a[2], a[3], near[n][0], near[n][1]);
        }
      }
    }
    __syncwarp();  // the words of this block are read
  }

  float* room = reinterpret_cast<float*>(codes.own);  // queries by components
  float* all = room + 8 * COLUMNS * D;
  const float lift = 1.0f / 256;
  for (int w = 0; w < COMPONENT_WARPS; w++) {
    if (warp == w) {
      ATTEND_UNROLL
      for (int n = 0; n < COLUMNS; n++) {
        ATTEND_UNROLL
        for (int i = 0; i < COMPONENT_STEPS * 4; i++) {
          float& to = room[(8 * n + 2 * at.t + i % 2) * D + i / 4 * 16 + at.g + i % 4 / 2 * 8];
          to = (w > 0 ? to : 0.0f) + sum[i / 4][n][i % 4];
        }
        total[n] += __shfl_xor_sync(0xffffffffu, total[n], 1);
        total[n] += __shfl_xor_sync(0xffffffffu, total[n], 2);
        if (at.t == 0) {
          all[8 * n + at.g] = (w > 0 ? all[8 * n + at.g] : 0.0f) + total[n];
        }
      }
    }
    __syncthreads();
  }
  const int columns = OWN ? D : dims[COMPONENT_ALL];
  for (int i = thread_; i < rows * D; i += COMPONENT_WARPS * 32) {
    if (i % D < codes.size) {
      sums[(size_t(blockIdx.y) * every + row1 + i / D) * columns + (OWN ? 0 : begin) + i % D] = room[i] * (lift * unit);
    }
  }
  if (thread_ < rows && (OWN || head == 0)) {
    totals[size_t(blockIdx.y) * every + row1 + thread_] = all[thread_] * lift;
  }
}

}  // namespace kvtool
