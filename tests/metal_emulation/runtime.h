// Metal Shading Language as C++ for clang: types, math, SIMD-group functions, simdgroup_matrix, barriers, atomics.
//
// A kernel is compiled twice. With STRICT, address spaces are distinct types and nothing is linked: mix-ups are compile errors.
// Without it they vanish, every load and store calls the checks in runtime.cpp, and each thread of a threadgroup is a fiber.
#pragma once

#include "thread.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef float float32_t;

extern "C" {
uint emu_exchange(int operation, int line, const void* mine, void* all, uint bytes);
void emu_simd_barrier(uint flags, int line);
void emu_group_barrier(uint flags, int line);
void* emu_threadgroup(uint index, uint bytes, uint alignment);
void emu_atomic(const volatile void* address, uint bytes, int line);
[[noreturn]] void emu_fail(const char* text, int line);
float expf(float), exp2f(float), exp10f(float), logf(float), log2f(float), log10f(float), sinf(float), cosf(float), tanf(float),
    asinf(float), acosf(float), atanf(float), sinhf(float), coshf(float), tanhf(float), powf(float, float), atan2f(float, float),
    fmodf(float, float), ldexpf(float, int), erff(float);
}

// ---- Address spaces
#define thread
#ifdef STRICT
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define kernel
#define METAL_FUNC inline __attribute__((__always_inline__))

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-07f
#define MAXFLOAT FLT_MAX
#define HALF_MAX 65504.0h
#define INT_MAX 0x7fffffff
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159265358979323846264338327950288f
#define M_PI_2_F 1.57079632679489661923132169163975144f
#define M_SQRT2_F 1.41421356237309504880168872420969808f
#define M_LOG2E_F 1.44269504088896340735992468100189214f
#define M_LN2_F 0.693147180559945309417232121458176568f
#define M_E_F 2.71828182845904523536028747135266250f

constexpr half operator""h(long double x) { return half(x); }
constexpr half operator""h(unsigned long long x) { return half(x); }

namespace metal {

// ---- Types
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define EMU_VECTORS(T)                                     \
  typedef T T##2 __attribute__((ext_vector_type(2)));      \
  typedef T T##3 __attribute__((ext_vector_type(3)));      \
  typedef T T##4 __attribute__((ext_vector_type(4)));
EMU_VECTORS(half)
EMU_VECTORS(bfloat)
EMU_VECTORS(float)
EMU_VECTORS(char)
EMU_VECTORS(uchar)
EMU_VECTORS(short)
EMU_VECTORS(ushort)
EMU_VECTORS(int)
EMU_VECTORS(uint)
EMU_VECTORS(long)
EMU_VECTORS(ulong)
#undef EMU_VECTORS
// Vectors aligned to their element.
#define EMU_PACKED(T)                                                        \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
EMU_PACKED(half)
EMU_PACKED(bfloat)
EMU_PACKED(float)
EMU_PACKED(uchar)
EMU_PACKED(ushort)
EMU_PACKED(uint)
#undef EMU_PACKED

template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <typename A, typename B>
inline constexpr bool is_same_v = __is_same(A, B);
template <typename A, typename B>
struct is_same {
  static constexpr bool value = __is_same(A, B);
};
template <bool B, typename T, typename F>
struct conditional {
  typedef T type;
};
template <typename T, typename F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, typename T, typename F>
using conditional_t = typename conditional<B, T, F>::type;
template <typename T>
inline constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <typename T>
inline constexpr bool is_integral_v = __is_integral(T);
template <typename T>
inline constexpr bool is_unsigned_v = __is_integral(T) && T(-1) > T(0);

namespace emu {
template <typename T>
struct Vector {
  typedef T element;
  static constexpr int size = 1;
  static constexpr bool is = false;
};
#define EMU_VECTOR(N)                                       \
  template <typename T>                                     \
  struct Vector<T __attribute__((ext_vector_type(N)))> {    \
    typedef T element;                                      \
    static constexpr int size = N;                          \
    static constexpr bool is = true;                        \
  };
EMU_VECTOR(2) EMU_VECTOR(3) EMU_VECTOR(4)
#undef EMU_VECTOR

template <typename V, typename A>
inline void append(V& v, int& i, A a) {
  if constexpr (Vector<A>::is) {
    for (int j = 0; j < Vector<A>::size; j++) v[i++] = (typename Vector<V>::element)a[j];
  } else {
    v[i++] = (typename Vector<V>::element)a;
  }
}
template <typename... A>
constexpr int elements = (Vector<A>::size + ... + 0);

// float4(a, b, c, d), float4(x), float4(half4) ...: the emulator writes vector constructors as calls of this.
template <typename T, int N, typename... A>
inline vec<T, N> make(A... a) {
  vec<T, N> v = {};
  if constexpr (sizeof...(A) == 1 && elements<A...> == 1) {
    T x = (T(a), ...);
    for (int i = 0; i < N; i++) v[i] = x;
  } else if constexpr (sizeof...(A) > 0) {
    static_assert(elements<A...> == N, "a vector constructor takes one scalar, or as many elements as it has");
    int i = 0;
    (append(v, i, a), ...);
  }
  return v;
}

template <typename V, typename F>
inline V each(V a, F f) {
  if constexpr (Vector<V>::is) {
    V r;
    for (int i = 0; i < Vector<V>::size; i++) r[i] = f(a[i]);
    return r;
  } else {
    return f(a);
  }
}
template <typename V, typename F>
inline V each(V a, V b, F f) {
  if constexpr (Vector<V>::is) {
    V r;
    for (int i = 0; i < Vector<V>::size; i++) r[i] = f(a[i], b[i]);
    return r;
  } else {
    return f(a, b);
  }
}
template <typename V>
inline constexpr bool floating = is_floating_point_v<typename Vector<V>::element>;
template <typename V>
inline constexpr bool integral = is_integral_v<typename Vector<V>::element>;
}  // namespace emu

template <typename To, typename From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, x);
}

template <typename T>
struct numeric_limits {
  static constexpr T max() { return is_unsigned_v<T> ? T(-1) : T(~(1ull << (8 * sizeof(T) - 1))); }
  static constexpr T min() { return is_unsigned_v<T> ? T(0) : T(1ull << (8 * sizeof(T) - 1)); }
  static constexpr T lowest() { return min(); }
};
template <>
struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float min() { return FLT_MIN; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float epsilon() { return FLT_EPSILON; }
  static constexpr float infinity() { return INFINITY; }
  static constexpr float quiet_NaN() { return NAN; }
};
template <>
struct numeric_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half min() { return half(6.103515625e-05f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half epsilon() { return half(0.0009765625f); }
  static constexpr half infinity() { return half(INFINITY); }
  static constexpr half quiet_NaN() { return half(NAN); }
};
template <>
struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return bfloat(3.38953139e+38f); }
  static constexpr bfloat min() { return bfloat(FLT_MIN); }
  static constexpr bfloat lowest() { return bfloat(-3.38953139e+38f); }
  static constexpr bfloat infinity() { return bfloat(INFINITY); }
  static constexpr bfloat quiet_NaN() { return bfloat(NAN); }
};

// ---- Math. float16 and bfloat16 compute in float32 and round once.
#define EMU_UNARY(NAME, EXPRESSION)                                                   \
  template <typename V>                                                               \
  inline enable_if_t<emu::floating<V>, V> NAME(V v) {                                 \
    typedef typename emu::Vector<V>::element T;                                       \
    return emu::each(v, [](T t) { float x = float(t); (void)x; return T(EXPRESSION); }); \
  }
#define EMU_BINARY(NAME, EXPRESSION)                                                  \
  template <typename V>                                                               \
  inline enable_if_t<emu::floating<V>, V> NAME(V v, V w) {                            \
    typedef typename emu::Vector<V>::element T;                                       \
    return emu::each(v, w, [](T t, T u) { float x = float(t), y = float(u); return T(EXPRESSION); }); \
  }
#define EMU_MATH                              \
  EMU_UNARY(exp, ::expf(x))                   \
  EMU_UNARY(exp2, ::exp2f(x))                 \
  EMU_UNARY(exp10, ::exp10f(x))               \
  EMU_UNARY(log, ::logf(x))                   \
  EMU_UNARY(log2, ::log2f(x))                 \
  EMU_UNARY(log10, ::log10f(x))               \
  EMU_UNARY(sin, ::sinf(x))                   \
  EMU_UNARY(cos, ::cosf(x))                   \
  EMU_UNARY(tan, ::tanf(x))                   \
  EMU_UNARY(asin, ::asinf(x))                 \
  EMU_UNARY(acos, ::acosf(x))                 \
  EMU_UNARY(atan, ::atanf(x))                 \
  EMU_UNARY(sinh, ::sinhf(x))                 \
  EMU_UNARY(cosh, ::coshf(x))                 \
  EMU_UNARY(tanh, ::tanhf(x))                 \
  EMU_UNARY(sqrt, __builtin_sqrtf(x))         \
  EMU_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x)) \
  EMU_UNARY(fabs, __builtin_fabsf(x))         \
  EMU_UNARY(floor, __builtin_floorf(x))       \
  EMU_UNARY(ceil, __builtin_ceilf(x))         \
  EMU_UNARY(rint, __builtin_rintf(x))         \
  EMU_UNARY(round, __builtin_roundf(x))       \
  EMU_UNARY(trunc, __builtin_truncf(x))       \
  EMU_BINARY(pow, ::powf(x, y))               \
  EMU_BINARY(powr, ::powf(x, y))              \
  EMU_BINARY(atan2, ::atan2f(x, y))           \
  EMU_BINARY(fmod, ::fmodf(x, y))             \
  EMU_BINARY(copysign, __builtin_copysignf(x, y)) \
  EMU_BINARY(fmax, __builtin_fmaxf(x, y))     \
  EMU_BINARY(fmin, __builtin_fminf(x, y))     \
  template <typename V>                       \
  inline V sincos(V x, thread V& c) {         \
    c = cos(x);                               \
    return sin(x);                            \
  }
EMU_MATH
namespace fast {
EMU_MATH
}
namespace precise {
EMU_MATH
}
EMU_UNARY(fract, x - __builtin_floorf(x))
EMU_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
EMU_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f)
EMU_BINARY(step, y < x ? 0.0f : 1.0f)
#undef EMU_MATH
#undef EMU_UNARY
#undef EMU_BINARY

template <typename V>
inline V max(V a, V b) {
  typedef typename emu::Vector<V>::element T;
  if constexpr (emu::floating<V>) return fmax(a, b);
  return emu::each(a, b, [](T x, T y) { return x < y ? y : x; });
}
template <typename V>
inline V min(V a, V b) {
  typedef typename emu::Vector<V>::element T;
  if constexpr (emu::floating<V>) return fmin(a, b);
  return emu::each(a, b, [](T x, T y) { return y < x ? y : x; });
}
template <typename V>
inline V max3(V a, V b, V c) { return max(max(a, b), c); }
template <typename V>
inline V min3(V a, V b, V c) { return min(min(a, b), c); }
template <typename V>
inline V clamp(V x, V low, V high) { return min(max(x, low), high); }
template <typename V, typename T>
inline enable_if_t<emu::Vector<V>::is && is_same_v<T, typename emu::Vector<V>::element>, V> clamp(V x, T low, T high) {
  return min(max(x, V(low)), V(high));
}
template <typename V>
inline V abs(V v) {
  typedef typename emu::Vector<V>::element T;
  if constexpr (emu::floating<V>) return fabs(v);
  return emu::each(v, [](T x) { return x < 0 ? T(-x) : x; });
}
template <typename V>
inline enable_if_t<emu::floating<V>, V> fma(V a, V b, V c) {
  typedef typename emu::Vector<V>::element T;
  if constexpr (emu::Vector<V>::is) {
    V r;
    for (int i = 0; i < emu::Vector<V>::size; i++) r[i] = fma(T(a[i]), T(b[i]), T(c[i]));
    return r;
  } else if constexpr (is_same_v<V, float>) {
    return __builtin_fmaf(a, b, c);
  } else {
    return V(__builtin_fma(double(float(a)), double(float(b)), double(float(c))));
  }
}
template <typename V>
inline enable_if_t<emu::floating<V>, V> mix(V a, V b, V t) { return a + (b - a) * t; }
template <typename T>
inline T select(T a, T b, bool condition) { return condition ? b : a; }
template <typename V, typename C>
inline enable_if_t<emu::Vector<C>::is, V> select(V a, V b, C condition) {
  V r;
  for (int i = 0; i < emu::Vector<V>::size; i++) r[i] = condition[i] ? b[i] : a[i];
  return r;
}
template <typename V>
inline bool all(V v) {
  for (int i = 0; i < emu::Vector<V>::size; i++)
    if (!v[i]) return false;
  return true;
}
template <typename V>
inline bool any(V v) {
  for (int i = 0; i < emu::Vector<V>::size; i++)
    if (v[i]) return true;
  return false;
}
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(half x) { return __builtin_isnan(float(x)); }
inline bool isnan(bfloat x) { return __builtin_isnan(float(x)); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(half x) { return __builtin_isinf(float(x)); }
inline bool isinf(bfloat x) { return __builtin_isinf(float(x)); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(half x) { return __builtin_isfinite(float(x)); }
inline bool isfinite(bfloat x) { return __builtin_isfinite(float(x)); }
inline bool signbit(float x) { return __builtin_signbitf(x); }
inline bool signbit(half x) { return __builtin_signbitf(float(x)); }
inline bool signbit(bfloat x) { return __builtin_signbitf(float(x)); }
inline float ldexp(float x, int k) { return ::ldexpf(x, k); }

template <typename V>
inline typename emu::Vector<V>::element dot(V a, V b) {
  typename emu::Vector<V>::element r = 0;
  for (int i = 0; i < emu::Vector<V>::size; i++) r += a[i] * b[i];
  return r;
}
template <typename V>
inline typename emu::Vector<V>::element length_squared(V a) { return dot(a, a); }
template <typename V>
inline typename emu::Vector<V>::element length(V a) { return sqrt(dot(a, a)); }

template <typename V>
inline enable_if_t<emu::integral<V>, V> popcount(V v) {
  typedef typename emu::Vector<V>::element T;
  return emu::each(v, [](T x) { return T(__builtin_popcountl(ulong(x) & (~0ul >> (64 - 8 * sizeof(T))))); });
}
template <typename T>
inline enable_if_t<is_integral_v<T>, T> clz(T x) {
  ulong y = ulong(x) & (~0ul >> (64 - 8 * sizeof(T)));
  return y ? T(__builtin_clzl(y) - (64 - 8 * sizeof(T))) : T(8 * sizeof(T));
}
template <typename T>
inline enable_if_t<is_integral_v<T>, T> ctz(T x) {
  ulong y = ulong(x) & (~0ul >> (64 - 8 * sizeof(T)));
  return y ? T(__builtin_ctzl(y)) : T(8 * sizeof(T));
}
inline uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
inline ulong reverse_bits(ulong x) { return __builtin_bitreverse64(x); }
inline uint mulhi(uint a, uint b) { return uint((ulong(a) * b) >> 32); }
inline uint rotate(uint x, uint n) { return __builtin_rotateleft32(x, n); }
template <typename T>
inline T extract_bits(T x, uint offset, uint bits) {
  return bits == 0 ? T(0) : T(T(x << (8 * sizeof(T) - offset - bits)) >> (8 * sizeof(T) - bits));
}
template <typename T>
inline T insert_bits(T base, T insert, uint offset, uint bits) {
  T mask = T(bits >= 8 * sizeof(T) ? ~T(0) : T(((ulong(1) << bits) - 1) << offset));
  return T((base & ~mask) | (T(insert << offset) & mask));
}

// ---- SIMD-groups of 32
#define EMU_LINE int line = __builtin_LINE()
#define EMU_PLAIN __attribute__((no_sanitize("kernel-address"), noinline))

namespace emu {
template <typename T>
struct Lanes {
  T value[32];
  uint active;
  uint self;
};
extern "C" uint emu_lane();
template <typename T>
EMU_PLAIN static void exchange(T x, int operation, int line, Lanes<T>& r) {
  r.active = emu_exchange(operation, line, &x, r.value, sizeof(T));
  r.self = emu_lane();
}
template <typename T>
constexpr bool shuffles = !is_same_v<typename Vector<T>::element, bool> && sizeof(typename Vector<T>::element) <= 4;
#define EMU_SHUFFLES(T) static_assert(emu::shuffles<T>, "SIMD functions take elements of 8 to 32 bits, and no bool")
// A tree in the order of a butterfly, lanes 16 apart first; inactive lanes do not count.
template <typename T, typename F>
EMU_PLAIN static T reduce(T x, int operation, int line, F f) {
  EMU_SHUFFLES(T);
  Lanes<T> r;
  exchange(x, operation, line, r);
  uint active = r.active;
  for (uint step = 16; step; step >>= 1)
    for (uint i = 0; i < step; i++) {
      bool a = active >> i & 1, b = active >> (i + step) & 1;
      if (a && b) r.value[i] = f(r.value[i], r.value[i + step]);
      if (!a && b) r.value[i] = r.value[i + step];
      if (b) active |= 1u << i;
    }
  return r.value[0];
}
template <typename T>
EMU_PLAIN static T pick(T x, uint lane, int operation, int line) {
  EMU_SHUFFLES(T);
  Lanes<T> r;
  exchange(x, operation, line, r);
  if (lane >= 32) emu_fail("a shuffle reads a lane above 31", line);
  if (!(r.active >> lane & 1)) emu_fail("a shuffle reads a lane that is inactive", line);
  return r.value[lane];
}
template <typename T, typename F>
EMU_PLAIN static T scan(T x, bool inclusive, T start, int line, F f) {
  EMU_SHUFFLES(T);
  Lanes<T> r;
  exchange(x, inclusive ? OP_PREFIX_INCLUSIVE : OP_PREFIX_EXCLUSIVE, line, r);
  T sum = start;
  for (uint i = 0; i < r.self + (inclusive ? 1 : 0); i++)
    if (r.active >> i & 1) sum = f(sum, r.value[i]);
  return sum;
}
}  // namespace emu

#define EMU_REDUCE(NAME, OP, EXPRESSION) \
  template <typename T>                  \
  inline T NAME(T x, EMU_LINE) {         \
    return emu::reduce(x, OP, line, [](T a, T b) { return T(EXPRESSION); }); \
  }
EMU_REDUCE(simd_sum, OP_SUM, a + b)
EMU_REDUCE(simd_product, OP_PRODUCT, a* b)
EMU_REDUCE(simd_max, OP_MAX, max(a, b))
EMU_REDUCE(simd_min, OP_MIN, min(a, b))
EMU_REDUCE(simd_and, OP_AND, a& b)
EMU_REDUCE(simd_or, OP_OR, a | b)
EMU_REDUCE(simd_xor, OP_XOR, a ^ b)
#undef EMU_REDUCE
template <typename T>
inline T simd_prefix_inclusive_sum(T x, EMU_LINE) { return emu::scan(x, true, T(0), line, [](T a, T b) { return T(a + b); }); }
template <typename T>
inline T simd_prefix_exclusive_sum(T x, EMU_LINE) { return emu::scan(x, false, T(0), line, [](T a, T b) { return T(a + b); }); }
template <typename T>
inline T simd_prefix_inclusive_product(T x, EMU_LINE) { return emu::scan(x, true, T(1), line, [](T a, T b) { return T(a * b); }); }
template <typename T>
inline T simd_prefix_exclusive_product(T x, EMU_LINE) { return emu::scan(x, false, T(1), line, [](T a, T b) { return T(a * b); }); }
template <typename T>
inline T simd_shuffle(T x, ushort lane, EMU_LINE) { return emu::pick(x, lane, OP_SHUFFLE, line); }
template <typename T>
inline T simd_shuffle_xor(T x, ushort mask, EMU_LINE) { return emu::pick(x, emu::emu_lane() ^ mask, OP_SHUFFLE_XOR, line); }
template <typename T>
inline T simd_shuffle_down(T x, ushort delta, EMU_LINE) {
  uint self = emu::emu_lane();
  return emu::pick(x, self + delta < 32 ? self + delta : self, OP_SHUFFLE_DOWN, line);
}
template <typename T>
inline T simd_shuffle_up(T x, ushort delta, EMU_LINE) {
  uint self = emu::emu_lane();
  return emu::pick(x, self >= delta ? self - delta : self, OP_SHUFFLE_UP, line);
}
template <typename T>
inline T simd_shuffle_rotate_down(T x, ushort delta, EMU_LINE) { return emu::pick(x, (emu::emu_lane() + delta) % 32, OP_ROTATE_DOWN, line); }
template <typename T>
inline T simd_shuffle_rotate_up(T x, ushort delta, EMU_LINE) { return emu::pick(x, (emu::emu_lane() + 32 - delta % 32) % 32, OP_ROTATE_UP, line); }
template <typename T>
inline T simd_broadcast(T x, ushort lane, EMU_LINE) { return emu::pick(x, lane, OP_BROADCAST, line); }
namespace emu {
EMU_PLAIN static ulong ballot(bool x, int operation, int line, ulong& active) {
  Lanes<uint> r;
  exchange(uint(x), operation, line, r);
  ulong bits = 0;
  for (uint i = 0; i < 32; i++)
    if (r.active >> i & 1) bits |= ulong(r.value[i]) << i;
  active = r.active;
  return bits;
}
}  // namespace emu
template <typename T>
inline T simd_broadcast_first(T x, EMU_LINE) {
  emu::Lanes<T> r;
  emu::exchange(x, OP_BROADCAST_FIRST, line, r);
  return r.value[__builtin_ctz(r.active)];
}
class simd_vote {
 public:
  typedef ulong vote_t;
  explicit constexpr simd_vote(vote_t bits = 0) : bits_(bits) {}
  explicit constexpr operator vote_t() const { return bits_; }
  bool all() const { return uint(bits_) == 0xffffffffu; }
  bool any() const { return bits_ != 0; }

 private:
  vote_t bits_;
};
inline simd_vote simd_ballot(bool x, EMU_LINE) {
  ulong active;
  return simd_vote(emu::ballot(x, OP_BALLOT, line, active));
}
inline bool simd_all(bool x, EMU_LINE) {
  ulong active;
  return emu::ballot(x, OP_ALL, line, active) == active;
}
inline bool simd_any(bool x, EMU_LINE) {
  ulong active;
  return emu::ballot(x, OP_ANY, line, active) != 0;
}

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
inline void threadgroup_barrier(mem_flags flags, EMU_LINE) { emu_group_barrier(uint(flags), line); }
inline void simdgroup_barrier(mem_flags flags, EMU_LINE) { emu_simd_barrier(uint(flags), line); }

// ---- simdgroup_matrix: lane l holds (row, column) and (row, column + 1) of the 8 x 8, as Apple GPUs do
namespace emu {
inline uint matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
inline uint matrix_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
}  // namespace emu

template <typename T, int Cols = 8, int Rows = 8>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "only 8 x 8");
  static_assert(is_floating_point_v<T>, "half, bfloat or float");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint lane = emu::emu_lane(), r = emu::matrix_row(lane), c = emu::matrix_column(lane);
    elements[0] = r == c ? diagonal : T(0);
    elements[1] = r == c + 1 ? diagonal : T(0);
  }
  thread vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int Cols, int Rows>
inline simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.elements[0] = value;
  m.elements[1] = value;
  return m;
}
template <typename T, int C, int R, typename P>
inline void emu_matrix_load(simdgroup_matrix<T, C, R>& m, P source, ulong per_row, ulong2 origin, bool transpose) {
  uint lane = emu::emu_lane();
  ulong r = emu::matrix_row(lane), c = emu::matrix_column(lane);
  for (ulong i = 0; i < 2; i++)
    m.elements[i] = transpose ? source[(origin.y + c + i) * per_row + origin.x + r] : source[(origin.y + r) * per_row + origin.x + c + i];
}
template <typename T, int C, int R, typename P>
inline void emu_matrix_store(simdgroup_matrix<T, C, R> m, P target, ulong per_row, ulong2 origin, bool transpose) {
  uint lane = emu::emu_lane();
  ulong r = emu::matrix_row(lane), c = emu::matrix_column(lane);
  for (ulong i = 0; i < 2; i++) {
    if (transpose) target[(origin.y + c + i) * per_row + origin.x + r] = m.elements[i];
    else target[(origin.y + r) * per_row + origin.x + c + i] = m.elements[i];
  }
}
#define EMU_MATRIX_MEMORY(SPACE)                                                                                                   \
  template <typename T, int C, int R>                                                                                              \
  inline void simdgroup_load(thread simdgroup_matrix<T, C, R>& m, const SPACE T* source, ulong per_row = C, ulong2 origin = 0,     \
                             bool transpose = false) {                                                                             \
    emu_matrix_load(m, source, per_row, origin, transpose);                                                                        \
  }                                                                                                                                \
  template <typename T, int C, int R>                                                                                              \
  inline void simdgroup_store(simdgroup_matrix<T, C, R> m, SPACE T* target, ulong per_row = C, ulong2 origin = 0,                  \
                              bool transpose = false) {                                                                            \
    emu_matrix_store(m, target, per_row, origin, transpose);                                                                       \
  }
EMU_MATRIX_MEMORY(device)
#ifdef STRICT
EMU_MATRIX_MEMORY(threadgroup)
#endif
#undef EMU_MATRIX_MEMORY

namespace emu {
template <typename U, typename V>
struct Operands {
  U a[2];
  V b[2];
};
}  // namespace emu
// d = a b + c, accumulated in float32
template <typename T, typename U, typename V, typename W>
EMU_PLAIN void simdgroup_multiply_accumulate(thread simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<U, 8, 8> a, simdgroup_matrix<V, 8, 8> b,
                                             simdgroup_matrix<W, 8, 8> c, EMU_LINE) {
  emu::Lanes<emu::Operands<U, V>> all;
  emu::exchange(emu::Operands<U, V>{{a.elements[0], a.elements[1]}, {b.elements[0], b.elements[1]}}, OP_MATRIX, line, all);
  if (all.active != 0xffffffffu) emu_fail("simdgroup_multiply_accumulate needs all 32 lanes", line);
  float left[8][8], right[8][8];
  for (uint lane = 0; lane < 32; lane++)
    for (uint i = 0; i < 2; i++) {
      left[emu::matrix_row(lane)][emu::matrix_column(lane) + i] = float(all.value[lane].a[i]);
      right[emu::matrix_row(lane)][emu::matrix_column(lane) + i] = float(all.value[lane].b[i]);
    }
  uint row = emu::matrix_row(all.self), column = emu::matrix_column(all.self);
  for (uint i = 0; i < 2; i++) {
    float sum = float(c.elements[i]);
    for (uint k = 0; k < 8; k++) sum = __builtin_fmaf(left[row][k], right[k][column + i], sum);
    d.elements[i] = T(sum);
  }
}
template <typename T, typename U, typename V>
inline void simdgroup_multiply(thread simdgroup_matrix<T, 8, 8>& d, simdgroup_matrix<U, 8, 8> a, simdgroup_matrix<V, 8, 8> b, EMU_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<T, 8, 8>(T(0)), line);
}

// ---- Atomics: only relaxed, as in Metal
enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define EMU_ATOMIC(SPACE, NAME, EXPRESSION)                                                                       \
  template <typename T>                                                                                           \
  inline T NAME(volatile SPACE atomic<T>* p, T operand, memory_order, EMU_LINE) {                                 \
    emu_atomic((const volatile void*)p, sizeof(T), line);                                                         \
    return emu::atomically((volatile SPACE T*)p, [operand](T old) { return T(EXPRESSION); });                    \
  }
#define EMU_ATOMICS(SPACE)                                                                                        \
  namespace emu {                                                                                                 \
  template <typename T, typename F>                                                                               \
  EMU_PLAIN static T atomically(volatile SPACE T* p, F f) {                                                       \
    T old = *p;                                                                                                   \
    *p = f(old);                                                                                                  \
    return old;                                                                                                   \
  }                                                                                                               \
  }                                                                                                               \
  EMU_ATOMIC(SPACE, atomic_fetch_add_explicit, old + operand)                                                     \
  EMU_ATOMIC(SPACE, atomic_fetch_sub_explicit, old - operand)                                                     \
  EMU_ATOMIC(SPACE, atomic_fetch_max_explicit, max(old, operand))                                                 \
  EMU_ATOMIC(SPACE, atomic_fetch_min_explicit, min(old, operand))                                                 \
  EMU_ATOMIC(SPACE, atomic_fetch_or_explicit, old | operand)                                                      \
  EMU_ATOMIC(SPACE, atomic_fetch_and_explicit, old & operand)                                                     \
  EMU_ATOMIC(SPACE, atomic_fetch_xor_explicit, old ^ operand)                                                     \
  EMU_ATOMIC(SPACE, atomic_exchange_explicit, (void(old), operand))                                               \
  template <typename T>                                                                                           \
  inline void atomic_store_explicit(volatile SPACE atomic<T>* p, T x, memory_order order, EMU_LINE) {             \
    atomic_exchange_explicit(p, x, order, line);                                                                  \
  }                                                                                                               \
  template <typename T>                                                                                           \
  inline T atomic_load_explicit(const volatile SPACE atomic<T>* p, memory_order, EMU_LINE) {                      \
    emu_atomic((const volatile void*)p, sizeof(T), line);                                                         \
    return emu::atomically((volatile SPACE T*)p, [](T old) { return old; });                                     \
  }
EMU_ATOMICS(device)
#ifdef STRICT
EMU_ATOMICS(threadgroup)
#endif
#undef EMU_ATOMICS
#undef EMU_ATOMIC

}  // namespace metal

using namespace metal;

// MLX's own names that its preamble offers to custom kernels.
template <typename T>
struct Limits {
  static constexpr T max = metal::numeric_limits<T>::max();
  static constexpr T min = metal::numeric_limits<T>::lowest();
};
