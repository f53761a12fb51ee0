// Attention of many queries on tensor cores: copies, products, and the readers of keys and values. Followed by prefill_tiles.cu.
//
// A tile is 64 rows in panels of 64 columns, 128 bytes a row, whose chunks of 16 bytes are permuted within a row so that the chunks of one
// column lie in different banks.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TILE_GROUP 1  // products of a warpgroup: prefill_group.cu
#endif

namespace kvtool {

constexpr int TILE_ROWS = 128;
constexpr int TILE_KEYS = 64;
constexpr int TILE_THREADS = 128;
constexpr float TILE_SLACK = 6;  // a score may pass the maximum by 2^6 before sums are rescaled
constexpr float TILE_LIFT = 8;
constexpr float TILE_RAISE = 256;  // decoded values times their factors are so much larger, further from the smallest half

__device__ __forceinline__ char* tile_memory() {
  extern __shared__ __attribute__((aligned(1024))) uint4 shared_memory[];
  return reinterpret_cast<char*>(shared_memory);
}

// Where chunk c of a row is, in bytes.
template <int ROWS>
__device__ __forceinline__ int tile_at(int row, int c) {
  return c / 8 * (ROWS * 128) + row * 128 + ((c ^ row) & 7) * 16;
}

__device__ __forceinline__ bool tile_aligned(const void* pointer) {
  return (reinterpret_cast<size_t>(pointer) & 15) == 0;
}

// Start to copy 8 or 16 bytes into shared memory, or to write zeros; wait for all copies of this thread.
template <int BYTES>
__device__ __forceinline__ void tile_copy(char* to, const void* from, bool real) {
  const uint32_t place = uint32_t(__cvta_generic_to_shared(to));
  if (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(real ? 16 : 0) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(place), "l"(from), "r"(real ? 8 : 0) : "memory");
  }
}
__device__ __forceinline__ void tile_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// What threads wrote to shared memory may be read by products of a warpgroup after this and a barrier.
__device__ __forceinline__ void tile_publish() {
#ifdef TILE_GROUP
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// A copy from memory that is not aligned.
template <int BYTES>
__device__ __forceinline__ void tile_copy_bytes(char* to, const void* from, bool real) {
  for (int i = 0; i < BYTES; i++) {
    to[i] = real ? static_cast<const char*>(from)[i] : char(0);
  }
}

// Four 8 x 8 matrices of 16-bit elements, each by rows or by columns: lane 8 i + k names row k of matrix i.
__device__ __forceinline__ void tile_rows(uint32_t (&x)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void tile_columns(uint32_t (&x)[4], const char* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// c += a b, the last argument naming the type of a and b.
__device__ __forceinline__ void tile_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void tile_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float tile_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as 16-bit elements, the first in the low half.
__device__ __forceinline__ uint32_t tile_pair(float x, float y, __half) {
  const __half2 pair = __floats2half2_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t tile_pair(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Weights of keys 16 k .. 16 k + 15 as the first operand of a product.
template <typename T>
__device__ __forceinline__ void tile_weights(uint32_t (&a)[4], const float (&p)[TILE_KEYS / 8][4], int k, T type) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    a[e] = tile_pair(p[2 * k + e / 2][e % 2 * 2], p[2 * k + e / 2][e % 2 * 2 + 1], type);
  }
}

__device__ __forceinline__ void tile_store(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
template <typename T>
__device__ __forceinline__ void tile_store(T* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = tile_pair(x, y, T());
}

// Bits of an exponent that only numbers that are not finite have whole; of +1 and of -1.
__device__ __forceinline__ uint32_t tile_exponent(__half) {
  return 0x7c00u;
}
__device__ __forceinline__ uint32_t tile_exponent(__nv_bfloat16) {
  return 0x7f80u;
}
__device__ __forceinline__ uint32_t tile_ones(__half) {
  return 0x3c003c00u;
}
__device__ __forceinline__ uint32_t tile_ones(__nv_bfloat16) {
  return 0x3f803f80u;
}

// The power of two of a number's exponent, and its inverse; both are normal numbers.
__device__ __forceinline__ void tile_unit(float largest, float& unit, float& inverse) {
  const int exponent = min(max(__float_as_int(largest) >> 23 & 255, 1), 253);
  unit = __int_as_float(exponent << 23);
  inverse = __int_as_float((254 - exponent) << 23);
}

// ---- Products of a warp: rows 16 warp .. 16 warp + 15 of each half of the queries by a tile

template <int D, typename T>
__device__ __forceinline__ void tile_scores(
    float (&s)[2][TILE_KEYS / 8][4], const char* queries, const char* keys, int warp, int lane, T type) {
  const char* a_row = queries + (warp * 16 + lane % 16) * 128;
  const char* b_row = keys + (lane / 16 * 8 + lane % 8) * 128;
  const int a_turn = (lane / 16 ^ lane % 8) * 16, b_turn = (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
  for (int n = 0; n < TILE_KEYS / 8; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s[0][n][e] = s[1][n][e] = 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t a[2][4];
    tile_rows(a[0], a_row + k / 4 * (TILE_ROWS * 128) + (a_turn ^ k % 4 * 32));
    tile_rows(a[1], a_row + k / 4 * (TILE_ROWS * 128) + 64 * 128 + (a_turn ^ k % 4 * 32));
#pragma unroll
    for (int n = 0; n < TILE_KEYS / 16; n++) {
      uint32_t b[4];
      tile_rows(b, b_row + k / 4 * (TILE_KEYS * 128) + n * (16 * 128) + (b_turn ^ k % 4 * 32));
#pragma unroll
      for (int m = 0; m < 2; m++) {
        tile_mma(s[m][2 * n], a[m], b[0], b[1], type);
        tile_mma(s[m][2 * n + 1], a[m], b[2], b[3], type);
      }
    }
  }
}

template <int D, typename T>
__device__ __forceinline__ void tile_values(
    float (&o0)[D / 8][4], float (&o1)[D / 8][4], const float (&p)[2][TILE_KEYS / 8][4], const char* values, int lane, T type) {
  const char* b_row = values + (lane / 8 % 2 * 8 + lane % 8) * 128;
  const int b_turn = (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int k = 0; k < TILE_KEYS / 16; k++) {
    uint32_t a[2][4];
    tile_weights(a[0], p[0], k, type);
    tile_weights(a[1], p[1], k, type);
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      uint32_t b[4];
      tile_columns(b, b_row + n / 4 * (TILE_KEYS * 128) + k * (16 * 128) + (b_turn ^ n % 4 * 32));
      tile_mma(o0[2 * n], a[0], b[0], b[1], type);
      tile_mma(o0[2 * n + 1], a[0], b[2], b[3], type);
      tile_mma(o1[2 * n], a[1], b[0], b[1], type);
      tile_mma(o1[2 * n + 1], a[1], b[2], b[3], type);
    }
  }
}

// ---- Readers. `fetch` starts to bring rows base .. base + 63 of a head, zeros from `length` on, to a stage of STAGE bytes. Where CODED,
// `decode` makes a tile of a stage that has arrived, with help of TABLE bytes that `prepare` has filled; else a stage is a tile. What is
// decoded is over `unit`; values may take factors of their rows.

template <typename Element, int D>
struct TilePlain {
  using T = Element;
  static constexpr bool CODED = false;
  static constexpr int STAGE = TILE_KEYS * D * 2;
  static constexpr int TABLE = 0;

  const T* data;
  float unit = 1.0f;

  __device__ __forceinline__ void prepare(char*) {}

  __device__ __forceinline__ void fetch(char* to, size_t head_row, int base, int length) const {
    const bool aligned = tile_aligned(data);
#pragma unroll
    for (int i = 0; i < TILE_KEYS * D / 8 / TILE_THREADS; i++) {
      const int x = threadIdx.x + i * TILE_THREADS, row = x / (D / 8), c = x % (D / 8);
      const T* from = data + (head_row + min(base + row, length - 1)) * D + c * 8;
      char* place = to + tile_at<TILE_KEYS>(row, c);
      if (aligned) {
        tile_copy<16>(place, from, base + row < length);
      } else {
        tile_copy_bytes<16>(place, from, base + row < length);
      }
    }
  }

  __device__ __forceinline__ void decode(const char*, char*, const char*) const {}
  template <bool SCALED>
  __device__ __forceinline__ void decode(const char*, char*, const char*, const float*) const {}
};

// Sign bits, lowest first, 1 for +1.
template <typename Element, int D>
struct TileSigns {
  using T = Element;
  static constexpr bool CODED = true;
  static constexpr int STAGE = TILE_KEYS * D / 8;
  static constexpr int TABLE = 0;

  const uint8_t* bits;

  __device__ __forceinline__ void prepare(char*) {}

  __device__ __forceinline__ void fetch(char* to, size_t head_row, int base, int length) const {
    if (threadIdx.x < STAGE / 8) {
      const int row = threadIdx.x / (D / 64);
      const uint8_t* from = bits + (head_row + min(base + row, length - 1)) * (D / 8) + threadIdx.x % (D / 64) * 8;
      if (tile_aligned(bits)) {
        tile_copy<8>(to + threadIdx.x * 8, from, true);
      } else {
        tile_copy_bytes<8>(to + threadIdx.x * 8, from, true);
      }
    }
  }

  // Eight signs, of a byte, at a time: an element is a one with the sign of the bit's opposite.
  __device__ __forceinline__ void decode(const char* from, char* tile, const char*) const {
#pragma unroll
    for (int i = 0; i < TILE_KEYS * D / 8 / TILE_THREADS; i++) {
      const int x = threadIdx.x + i * TILE_THREADS;
      const uint32_t plus = uint32_t(uint8_t(from[x])) * 0x8001u;  // and 15 further left: of each pair the upper one's
      uint32_t word[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        word[e] = (plus << (15 - 2 * e) & 0x80008000u) ^ (tile_ones(T()) | 0x80008000u);
      }
      *reinterpret_cast<uint4*>(tile + tile_at<TILE_KEYS>(x / (D / 8), x % (D / 8))) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

// For queries of a type.
template <int D, typename Q>
__device__ __forceinline__ TileSigns<Q, D> tile_signs(const Q*, const uint8_t* bits) {
  return {bits};
}

// Two 4-bit indices a byte, low nibble first, clamped to the table. The help is a table of all pairs of entries, a copy for each lane.
template <int D>
struct TileNibbles {
  using T = __half;
  static constexpr bool CODED = true;
  static constexpr int STAGE = TILE_KEYS * D / 2;
  static constexpr int TABLE = 256 * 32 * 4;

  const uint8_t* codes;
  const float* table;
  int last;
  float unit = 1.0f;

  __device__ __forceinline__ void prepare(char* help) {
    const float entry = table[min(int(threadIdx.x % 16), last)];
    float largest = isfinite(entry) ? fabsf(entry) : 0.0f, inverse;
    for (int offset = 8; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(PREFILL_ALL, largest, offset));
    }
    tile_unit(largest, unit, inverse);
    const int own = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int pair = warp; pair < 256; pair += TILE_THREADS / 32) {
      const float low = __shfl_sync(PREFILL_ALL, entry, pair % 16), high = __shfl_sync(PREFILL_ALL, entry, pair / 16);
      reinterpret_cast<uint32_t*>(help)[pair * 32 + own] = tile_pair(low * inverse, high * inverse, T());
    }
  }

  __device__ __forceinline__ void fetch(char* to, size_t head_row, int base, int length) const {
    const bool aligned = tile_aligned(codes);
#pragma unroll
    for (int i = 0; i < STAGE / 16 / TILE_THREADS; i++) {
      const int x = threadIdx.x + i * TILE_THREADS, row = x / (D / 32);
      const uint8_t* from = codes + (head_row + min(base + row, length - 1)) * (D / 2) + x % (D / 32) * 16;
      if (aligned) {
        tile_copy<16>(to + x * 16, from, true);
      } else {
        tile_copy_bytes<16>(to + x * 16, from, true);
      }
    }
  }

  // Where SCALED, times the rows' factors and TILE_RAISE.
  template <bool SCALED>
  __device__ __forceinline__ void decode(const char* from, char* tile, const char* help, const float* factors) const {
    const uint32_t own = threadIdx.x % 32 * 4;
    const auto pair = [&](uint32_t shifted) { return *reinterpret_cast<const uint32_t*>(help + ((shifted & 0x7f80u) | own)); };
#pragma unroll
    for (int i = 0; i < TILE_KEYS * D / 8 / TILE_THREADS; i++) {
      const int x = threadIdx.x + i * TILE_THREADS;
      const uint32_t word = reinterpret_cast<const uint32_t*>(from)[x];
      uint32_t pairs[4] = {pair(word << 7), pair(word >> 1), pair(word >> 9), pair(word >> 17)};
      if (SCALED) {
        const __half2 by = __float2half2_rn(factors[x / (D / 8)] * TILE_RAISE);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&pairs[e]), by);
          pairs[e] = *reinterpret_cast<const uint32_t*>(&scaled);
        }
      }
      *reinterpret_cast<uint4*>(tile + tile_at<TILE_KEYS>(x / (D / 8), x % (D / 8))) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
};

// ---- The block's memory, in bytes

template <int D, typename Keys, typename Values>
struct TilePlan {
  static constexpr int QUERIES = 0;
  static constexpr int KEY_STAGES = QUERIES + TILE_ROWS * D * 2;
  static constexpr int VALUE_STAGES = KEY_STAGES + 2 * Keys::STAGE;
  static constexpr int KEY_TILE = VALUE_STAGES + 2 * Values::STAGE;
  static constexpr int VALUE_TILE = KEY_TILE + (Keys::CODED ? TILE_KEYS * D * 2 : 0);
  static constexpr int KEY_TABLE = VALUE_TILE + (Values::CODED ? TILE_KEYS * D * 2 : 0);
  static constexpr int VALUE_TABLE = KEY_TABLE + Keys::TABLE;
  static constexpr int SIDES = VALUE_TABLE + Values::TABLE;       // norm, bias and factor of two tiles' keys
  static constexpr int RANGES = SIDES + 2 * 3 * TILE_KEYS * 4;    // of the rows
  static constexpr int LIMITS = RANGES + TILE_ROWS * 8;           // of the warps' rows
  static constexpr int BYTES = LIMITS + 4 * 16;
};

}  // namespace kvtool
