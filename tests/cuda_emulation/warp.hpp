// A block of CUDA threads on a CPU: each is a fiber of one thread, and whatever the lanes of a warp do together meets here.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../emulation_switch.hpp"

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __CUDA_ARCH_EMULATED__ 1

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Dim { unsigned x, y, z; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using __half = _Float16;
struct __half2 { _Float16 x, y; };
inline __half2 __floats2half2_rn(float x, float y) { return {_Float16(x), _Float16(y)}; }
inline float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }

struct __nv_bfloat16 {
  uint16_t bits = 0;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    bits = std::isnan(x) ? 0x7fc0 : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &word, 4);
    return x;
  }
};

inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline uint32_t __float_as_uint(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <typename T> inline T __ldg(const T* p) {
  if (reinterpret_cast<size_t>(p) % alignof(T)) { fprintf(stderr, "a load that is not aligned\n"); abort(); }
  return *p;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) found |= uint32_t(both >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
  return found;
}

namespace emulated {
struct Gate { int count = 0, phase = 0; };
constexpr size_t STACK = 1 << 16;
// It waits for a phase of a gate to pass, and is not woken before.
struct Fiber { void* stack_pointer; std::unique_ptr<char[]> stack; Dim thread{}; const Gate* gate = nullptr; int phase = 0; bool done = false; };
struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Gate> warps;
  std::vector<uint32_t> slots;  // 8 words a thread
  Gate all;
  Gate meetings[16];
  void* home;
  int current = 0;
};
inline Block* block;
inline Dim block_index, grid;
inline void wait(Gate& gate, int members) {
  const int phase = gate.phase;
  if (++gate.count == members) { gate.count = 0; gate.phase++; return; }
  Fiber& fiber = *block->fibers[size_t(block->current)];
  fiber.gate = &gate;
  fiber.phase = phase;
  emulated_switch(&fiber.stack_pointer, block->home);
  fiber.gate = nullptr;
}
inline int me() { return block->current; }
inline int lane() { return me() % 32; }
inline void warp() { wait(block->warps[size_t(me() / 32)], 32); }
inline uint32_t* slot(int of) { return &block->slots[size_t(me() / 32 * 32 + of) * 8]; }
template <typename T> inline T exchange(T x, int from) {
  static_assert(sizeof(T) == 4);
  memcpy(slot(lane()), &x, 4);
  warp();
  T y;
  memcpy(&y, slot(from), 4);
  warp();
  return y;
}
inline _Float16 half_of(uint32_t word, int upper) {
  const uint16_t bits = uint16_t(word >> (16 * upper));
  _Float16 h;
  memcpy(&h, &bits, 2);
  return h;
}
// What a half is written with: tensor cores do not normalise a subnormal.
inline int exponent_of(uint32_t word, int upper) {
  return std::max(std::ilogb(float(half_of(word, upper))), -14);
}
// Tensor cores align terms by the exponents their factors are written with, cut what is below SUM_BITS of the largest, and cut the sum to a
// float32. An H200 is matched by 25 bits; one fewer is the stricter test.
constexpr int SUM_BITS = 24;
inline float aligned_sum(const double (&terms)[17], int exponent) {
  double sum = 0;
  for (double x : terms) sum += std::trunc(std::ldexp(x, SUM_BITS - exponent));
  sum = std::ldexp(sum, exponent - SUM_BITS);
  const float near = float(sum);
  return std::fabs(double(near)) > std::fabs(sum) ? std::nextafterf(near, 0.0f) : near;
}
template <typename Body> void run(Dim grid_, int threads, Body body) {
  static Body* entry;
  entry = &body;
  void (*const start)() = +[] {
    (*entry)();
    Fiber& fiber = *block->fibers[size_t(block->current)];
    fiber.done = true;
    emulated_switch(&fiber.stack_pointer, block->home);
  };
  grid = grid_;
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      Block own;
      block = &own;
      block_index = {x, y, 0};
      own.warps.resize(size_t(threads + 31) / 32);
      own.slots.resize(size_t(threads) * 8);
      for (int i = 0; i < threads; i++) {
        own.fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *own.fibers.back();
        fiber.stack.reset(new char[STACK]);
        fiber.thread = {unsigned(i), 0, 0};
        void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK) & ~uintptr_t(15));
        *--top = nullptr;  // alignment: start begins as if called
        *--top = reinterpret_cast<void*>(start);
        for (int k = 0; k < 6; k++) *--top = nullptr;
        fiber.stack_pointer = top;
      }
      for (int left = threads; left > 0;) {
        left = 0;
        bool ran = false;
        for (int i = 0; i < threads; i++) {
          Fiber& fiber = *own.fibers[size_t(i)];
          if (fiber.done) continue;
          left++;
          if (fiber.gate && fiber.gate->phase == fiber.phase) continue;
          own.current = i;
          ran = true;
          emulated_switch(&own.home, fiber.stack_pointer);
        }
        if (left && !ran) { fprintf(stderr, "%d threads wait for others that do not come\n", left); abort(); }
      }
    }
}
}  // namespace emulated

#define threadIdx (emulated::block->fibers[size_t(emulated::me())]->thread)
#define blockIdx (emulated::block_index)
#define gridDim (emulated::grid)
inline void __syncthreads() { emulated::wait(emulated::block->all, int(emulated::block->fibers.size())); }
inline void __trap() { fprintf(stderr, "a trap\n"); abort(); }
inline void __syncwarp() { emulated::warp(); }
template <typename T> inline T __shfl_xor_sync(uint32_t, T x, int mask) { return emulated::exchange(x, emulated::lane() ^ mask); }
template <typename T> inline T __shfl_sync(uint32_t, T x, int from) { return emulated::exchange(x, from % 32); }
inline uint32_t __ballot_sync(uint32_t, bool x) {
  *emulated::slot(emulated::lane()) = x;
  emulated::warp();
  uint32_t found = 0;
  for (int i = 0; i < 32; i++) found |= uint32_t(*emulated::slot(i) != 0) << i;
  emulated::warp();
  return found;
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t x) {
  *emulated::slot(emulated::lane()) = x;
  emulated::warp();
  uint32_t largest = 0;
  for (int i = 0; i < 32; i++) largest = std::max(largest, *emulated::slot(i));
  emulated::warp();
  return largest;
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __syncthreads_and(bool x) {
  *emulated::slot(emulated::lane()) = x;
  __syncthreads();
  bool all = true;
  for (size_t i = 0; i < emulated::block->fibers.size(); i++) all = all && emulated::block->slots[8 * i] != 0;
  __syncthreads();
  return all;
}

namespace kvtool {
// In place of PTX.
inline void decode_mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t given[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(emulated::slot(emulated::lane()), given, sizeof given);
  emulated::warp();
  const int g = emulated::lane() / 4, t = emulated::lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int row = i / 2, column = 2 * t + i % 2;
    double terms[17] = {c[i]};
    int exponent = c[i] == 0 ? -200 : std::ilogb(c[i]);
    for (int k = 0; k < 16; k++) {
      const uint32_t a = emulated::slot(4 * g + k / 2 % 4)[row + 2 * (k / 8)];
      const uint32_t b = emulated::slot(4 * column + k / 2 % 4)[4 + k / 8];
      terms[k + 1] = double(emulated::half_of(a, k % 2)) * double(emulated::half_of(b, k % 2));
      if (terms[k + 1] != 0) exponent = std::max(exponent, emulated::exponent_of(a, k % 2) + emulated::exponent_of(b, k % 2));
    }
    c[i] = emulated::aligned_sum(terms, exponent);
  }
  emulated::warp();
}
inline void decode_count(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  const uint32_t given[3] = {a0, a1, b};
  memcpy(emulated::slot(emulated::lane()), given, sizeof given);
  emulated::warp();
  const int g = emulated::lane() / 4, t = emulated::lane() % 4;
  for (int i = 0; i < 4; i++) {
    for (int k = 0; k < 4; k++) {
      c[i] += __popc(emulated::slot(4 * g + k)[i / 2] & emulated::slot(4 * (2 * t + i % 2) + k)[2]);
    }
  }
  emulated::warp();
}
inline uint32_t decode_transpose(uint32_t x) {
  *emulated::slot(emulated::lane()) = x;
  emulated::warp();
  const int g = emulated::lane() / 4, t = emulated::lane() % 4;
  uint32_t y = 0;
  for (int i = 0; i < 2; i++) {
    const uint32_t word = *emulated::slot(4 * (2 * t + i) + g / 2);
    y |= (word >> (16 * (g % 2)) & 0xffff) << (16 * i);
  }
  emulated::warp();
  return y;
}
inline void decode_columns(uint32_t (&x)[4], const char* row) {
  memcpy(emulated::slot(emulated::lane()), &row, sizeof row);
  emulated::warp();
  const int g = emulated::lane() / 4, t = emulated::lane() % 4;
  for (int i = 0; i < 4; i++) {
    x[i] = 0;
    for (int k = 0; k < 2; k++) {
      const char* from;
      memcpy(&from, emulated::slot(8 * i + 2 * t + k), sizeof from);
      uint16_t half;
      memcpy(&half, from + 2 * g, 2);
      x[i] |= uint32_t(half) << (16 * k);
    }
  }
  emulated::warp();
}
template <typename T> inline void decode_copy(T* to, const T* from) {  // arrives at once
  constexpr size_t SIZE = sizeof(T) == 1 ? 16 : sizeof(T);
  if (reinterpret_cast<size_t>(from) % SIZE) { fprintf(stderr, "a copy that is not aligned\n"); abort(); }
  memcpy(to, from, SIZE);
}
inline void decode_prefetch(const void*) {}
inline void decode_commit() {}
inline void decode_wait() { emulated::warp(); }
inline void decode_arrived() { emulated::warp(); }
inline void decode_meet(int barrier, int threads) { emulated::wait(emulated::block->meetings[barrier], threads); }
template <typename F> inline uint32_t decode_by_halves(F f) {
  uint32_t found = 0;
  for (int i = 0; i < 2; i++) {
    const _Float16 h = f(i);
    uint16_t bits;
    memcpy(&bits, &h, 2);
    found |= uint32_t(bits) << (16 * i);
  }
  return found;
}
inline uint32_t decode_add_product(uint32_t x, uint32_t y, uint32_t sum) {
  return decode_by_halves([&](int i) {
    return _Float16(double(emulated::half_of(x, i)) * double(emulated::half_of(y, i)) + double(emulated::half_of(sum, i)));
  });
}
inline uint32_t decode_product(uint32_t x, uint32_t y, uint32_t rest) {
  const uint32_t near = decode_by_halves([&](int i) { return _Float16(float(emulated::half_of(x, i)) * float(emulated::half_of(y, i))); });
  return decode_add_product(x, y, (near & rest) ^ 0x80008000u);
}
inline uint32_t coded_short(const void* from) { return __ldg(static_cast<const uint16_t*>(from)); }
inline float decode_exp2(float x) { return exp2f(x); }
// As on a GPU, the first KiB of shared memory is not the block's.
alignas(65536) inline char emulated_memory[1 << 18];
inline uint32_t decode_address(const char* pointer) { return uint32_t(pointer - emulated_memory); }
template <int OFFSET> inline uint32_t decode_load(uint32_t address) {
  uint32_t word;
  memcpy(&word, emulated_memory + address + OFFSET, 4);
  return word;
}
inline char* decode_memory() { return emulated_memory + 1024; }
}  // namespace kvtool
