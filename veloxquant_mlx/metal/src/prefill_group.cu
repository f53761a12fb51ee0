// Products of a warpgroup (wgmma, Hopper), for prefill_tiles.cu: 64 rows by a whole tile of keys or of values, which it reads from shared
// memory itself. c += a b; a is in shared memory, or in registers as for mma.m16n8k16 (a warp has 16 of the rows); sums are laid out as there.
//
// A descriptor names a matrix in panels of 64 columns, 128 bytes a row, whose chunks are permuted as tile_at does it: start, distance of
// panels, distance of 8 rows, all over 16; the panels' distance counts only where the contraction is over rows.

#ifdef TILE_GROUP
namespace kvtool {

__device__ __forceinline__ uint64_t tile_matrix(const char* start, int panel) {
  const uint64_t at = uint32_t(__cvta_generic_to_shared(start)) >> 4 & 0x3fff;
  return at | uint64_t(panel >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// Registers of products are as they should be; close a group of products; wait for all groups but the last PENDING.
__device__ __forceinline__ void tile_group_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void tile_group_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void tile_group_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler moves no use of the sums across this.
template <int N>
__device__ __forceinline__ void tile_hold(float (&c)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
  }
}

// clang-format off
#define TILE_FOUR(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define TILE_LIST32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define TILE_LIST64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define TILE_SUMS32 \
  TILE_FOUR(c[0]), TILE_FOUR(c[1]), TILE_FOUR(c[2]), TILE_FOUR(c[3]), \
  TILE_FOUR(c[4]), TILE_FOUR(c[5]), TILE_FOUR(c[6]), TILE_FOUR(c[7])
#define TILE_SUMS64 \
  TILE_FOUR(c[0]), TILE_FOUR(c[1]), TILE_FOUR(c[2]), TILE_FOUR(c[3]), \
  TILE_FOUR(c[4]), TILE_FOUR(c[5]), TILE_FOUR(c[6]), TILE_FOUR(c[7]), \
  TILE_FOUR(c[8]), TILE_FOUR(c[9]), TILE_FOUR(c[10]), TILE_FOUR(c[11]), \
  TILE_FOUR(c[12]), TILE_FOUR(c[13]), TILE_FOUR(c[14]), TILE_FOUR(c[15])
#define TILE_GROUP_MMA(TYPE, NAME) \
  __device__ __forceinline__ void tile_group_mma(float (&c)[8][4], uint64_t a, uint64_t b, int add, TYPE) { \
    asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " " TILE_LIST32 \
        ", %32, %33, p, 1, 1, 0, 0; }" : TILE_SUMS32 : "l"(a), "l"(b), "r"(add)); \
  } \
  __device__ __forceinline__ void tile_group_mma(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b, TYPE) { \
    asm volatile( \
        "{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " " TILE_LIST32 \
        ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }" : TILE_SUMS32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  } \
  __device__ __forceinline__ void tile_group_mma(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b, TYPE) { \
    asm volatile( \
        "{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " " TILE_LIST64 \
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 1; }" : TILE_SUMS64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)); \
  }
// clang-format on
TILE_GROUP_MMA(__half, "f16")
TILE_GROUP_MMA(__nv_bfloat16, "bf16")

// Start the scores of 64 rows, and the values of their weights.
template <int D, typename T>
__device__ __forceinline__ void tile_group_scores(float (&s)[TILE_KEYS / 8][4], const char* queries, const char* keys, T type) {
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const char* a = queries + k / 4 * (TILE_ROWS * 128) + k % 4 * 32;
    tile_group_mma(s, tile_matrix(a, 16), tile_matrix(keys + k / 4 * (TILE_KEYS * 128) + k % 4 * 32, 16), k > 0, type);
  }
  tile_group_commit();
}
template <int D, typename T>
__device__ __forceinline__ void tile_group_values(float (&o)[D / 8][4], const float (&p)[TILE_KEYS / 8][4], const char* values, T type) {
  uint32_t a[TILE_KEYS / 16][4];
#pragma unroll
  for (int k = 0; k < TILE_KEYS / 16; k++) {
    tile_weights(a[k], p, k, type);
  }
  tile_group_fence();
#pragma unroll
  for (int k = 0; k < TILE_KEYS / 16; k++) {
    tile_group_mma(o, a[k], tile_matrix(values + k * (16 * 128), TILE_KEYS * 128), type);
  }
  tile_group_commit();
}

}  // namespace kvtool
#endif
