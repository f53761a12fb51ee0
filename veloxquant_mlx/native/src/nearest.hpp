// The nearest codeword of each of 64 vectors, which lie in the lanes: a codeword is the same for all of them.
//
// Squared differences are summed in the order of the entries, each operation rounded by itself.
#pragma once
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int AT_ONCE = 64;  // vectors, turned so that an entry of many lies together

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float Values __attribute__((vector_size(4 * W)));
  typedef int32_t Index __attribute__((vector_size(4 * W)));
  using Number = int32_t;
};
template <>
struct Lanes<double> {
  typedef double Values __attribute__((vector_size(4 * W)));
  typedef int64_t Index __attribute__((vector_size(4 * W)));
  using Number = int64_t;
};

// Vectors that stay in registers beside their nearest codewords.
constexpr int registers(int size) { return W == 8 ? (size <= 2 ? 3 : size <= 4 ? 2 : 1) : size <= 4 ? 4 : size <= 8 ? 2 : 1; }

// Nearest of `words` of N vectors of lanes of x[SIZE][AT_ONCE], the lowest of equals; a distance that is NaN is never the nearest.
template <class T, int SIZE, int N>
void some_nearest(const T* x, const T* words, int count, int32_t* nearest) {
  using Values = typename Lanes<T>::Values;
  using Index = typename Lanes<T>::Index;
  using Number = typename Lanes<T>::Number;
  constexpr int EACH = int(sizeof(Values) / sizeof(T));
  Values entries[SIZE][N], best[N];
  Index index[N];
  for (int i = 0; i < SIZE; i++)
    for (int n = 0; n < N; n++) memcpy(&entries[i][n], x + i * AT_ONCE + n * EACH, sizeof(Values));
  for (int n = 0; n < N; n++) best[n] = T(__builtin_inf()) - Values{}, index[n] = Index{};
  for (int w = 0; w < count; w++, words += SIZE) {
    Values total[N];
    for (int n = 0; n < N; n++) total[n] = (entries[0][n] - words[0]) * (entries[0][n] - words[0]);
    for (int i = 1; i < SIZE; i++)
      for (int n = 0; n < N; n++) total[n] += (entries[i][n] - words[i]) * (entries[i][n] - words[i]);
    for (int n = 0; n < N; n++) {
      const Index nearer = total[n] < best[n];
      best[n] = nearer ? total[n] : best[n];
      index[n] = nearer ? Number(w) - Index{} : index[n];
    }
  }
  for (int n = 0; n < N; n++)
    for (int j = 0; j < EACH; j++) nearest[n * EACH + j] = int32_t(index[n][j]);
}

// Of vectors of any size, whose entries do not stay in registers.
template <class T>
void long_nearest(const T* x, int size, const T* words, int count, int32_t* nearest) {
  using Values = typename Lanes<T>::Values;
  using Index = typename Lanes<T>::Index;
  using Number = typename Lanes<T>::Number;
  constexpr int EACH = int(sizeof(Values) / sizeof(T)), N = 4;
  for (int at = 0; at < AT_ONCE; at += N * EACH) {
    Values best[N];
    Index index[N];
    for (int n = 0; n < N; n++) best[n] = T(__builtin_inf()) - Values{}, index[n] = Index{};
    for (int w = 0; w < count; w++) {
      const T* word = words + int64_t(w) * size;
      Values total[N];
      for (int n = 0; n < N; n++) total[n] = Values{};
      for (int i = 0; i < size; i++)
        for (int n = 0; n < N; n++) {
          Values entry;
          memcpy(&entry, x + i * AT_ONCE + at + n * EACH, sizeof entry);
          total[n] += (entry - word[i]) * (entry - word[i]);
        }
      for (int n = 0; n < N; n++) {
        const Index nearer = total[n] < best[n];
        best[n] = nearer ? total[n] : best[n];
        index[n] = nearer ? Number(w) - Index{} : index[n];
      }
    }
    for (int n = 0; n < N; n++)
      for (int j = 0; j < EACH; j++) nearest[at + n * EACH + j] = int32_t(index[n][j]);
  }
}

// a - b c, rounded once where the machine can.
template <class Values>
inline Values less_product(Values a, Values b, Values c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(a[0]) == 4)
    return (Values)_mm512_fnmadd_ps((__m512)b, (__m512)c, (__m512)a);
  else
    return (Values)_mm512_fnmadd_pd((__m512d)b, (__m512d)c, (__m512d)a);
#elif defined(__AVX2__)
  if constexpr (sizeof(a[0]) == 4)
    return (Values)_mm256_fnmadd_ps((__m256)b, (__m256)c, (__m256)a);
  else
    return (Values)_mm256_fnmadd_pd((__m256d)b, (__m256d)c, (__m256d)a);
#elif defined(KVTOOL_USE_NEON)
  if constexpr (sizeof(a[0]) == 4)
    return (Values)vfmsq_f32((float32x4_t)a, (float32x4_t)b, (float32x4_t)c);
  else
    return (Values)vfmsq_f64((float64x2_t)a, (float64x2_t)b, (float64x2_t)c);
#else
  return a - b * c;
#endif
}

// What is known of a table's words: half the square of each, and the largest square.
template <class T>
struct Squares {
  const T* half;
  T largest;
};

// Nearest of N vectors of lanes by |w|^2 / 2 - <x, w>, in two thirds of the operations. Whether it is `some_nearest`'s for all of them: where
// the second is further by more than both ways can be wrong, (8 size + 10) 2^-24 (|x|^2 + |w|^2) in float32, and nothing has underflowed.
template <class T, int SIZE, int N>
bool screened(const T* x, const T* words, Squares<T> squares, int count, int32_t* nearest) {
  using Values = typename Lanes<T>::Values;
  using Index = typename Lanes<T>::Index;
  using Number = typename Lanes<T>::Number;
  constexpr int EACH = int(sizeof(Values) / sizeof(T));
  constexpr T UNIT = sizeof(T) == 4 ? T(0x1p-24) : T(0x1p-53), LEAST = sizeof(T) == 4 ? T(0x1p-110) : T(0x1p-1000);
  Values entries[SIZE][N], best[N], second[N];
  Index index[N];
  for (int i = 0; i < SIZE; i++)
    for (int n = 0; n < N; n++) memcpy(&entries[i][n], x + i * AT_ONCE + n * EACH, sizeof(Values));
  for (int n = 0; n < N; n++) best[n] = second[n] = T(__builtin_inf()) - Values{}, index[n] = Index{};
  Index number{};
  for (int w = 0; w < count; w++, words += SIZE, number += 1) {
    Values score[N];
    for (int n = 0; n < N; n++) score[n] = squares.half[w] - Values{};
    for (int i = 0; i < SIZE; i++)
      for (int n = 0; n < N; n++) score[n] = less_product(score[n], entries[i][n], words[i] - Values{});
    for (int n = 0; n < N; n++) {
      const Index nearer = score[n] < best[n];
      const Values other = best[n] > score[n] ? best[n] : score[n];
      second[n] = other < second[n] ? other : second[n];
      best[n] = score[n] < best[n] ? score[n] : best[n];
      index[n] = nearer ? number : index[n];
    }
  }
  Index sure = Index{} - 1;
  for (int n = 0; n < N; n++) {
    Values power = squares.largest - Values{};
    for (int i = 0; i < SIZE; i++) power += entries[i][n] * entries[i][n];
    const Index apart = second[n] - best[n] > power * ((8 * SIZE + 12) * UNIT) + LEAST;  // never of what is no number
    sure &= apart;
    for (int j = 0; j < EACH; j++) nearest[n * EACH + j] = int32_t(index[n][j]);
  }
  Number all_of_them = -1;
  for (int j = 0; j < EACH; j++) all_of_them &= sure[j];
  return all_of_them;
}

template <class T, int SIZE>
void nearest_by(const T* x, const T* words, Squares<T> squares, int count, int32_t* nearest) {
#if defined(__AVX512F__) || defined(KVTOOL_USE_NEON)
  constexpr int N = 4;  // of 32 registers
#else
  constexpr int N = 2;
#endif
  constexpr int STEP = N * int(4 * W / sizeof(T));
  for (int at = 0; at < AT_ONCE; at += STEP)
    if (!screened<T, SIZE, N>(x + at, words, squares, count, nearest + at)) some_nearest<T, SIZE, N>(x + at, words, count, nearest + at);
}

template <class T, int SIZE>
void nearest_of(const T* x, const T* words, int count, int32_t* nearest) {
  constexpr int N = registers(SIZE), STEP = N * int(4 * W / sizeof(T));
  int at = 0;
  for (; at + STEP <= AT_ONCE; at += STEP) some_nearest<T, SIZE, N>(x + at, words, count, nearest + at);
  for (; at < AT_ONCE; at += STEP / N) some_nearest<T, SIZE, 1>(x + at, words, count, nearest + at);
}

template <class T>
void nearest_of(const T* x, int size, const T* words, int count, int32_t* nearest) {
  switch (size) {
    case 1: return nearest_of<T, 1>(x, words, count, nearest);
    case 2: return nearest_of<T, 2>(x, words, count, nearest);
    case 3: return nearest_of<T, 3>(x, words, count, nearest);
    case 4: return nearest_of<T, 4>(x, words, count, nearest);
    case 8: return nearest_of<T, 8>(x, words, count, nearest);
    default: return long_nearest(x, size, words, count, nearest);
  }
}

// The same of large tables, whose squares are known.
template <class T>
void nearest_of(const T* x, int size, const T* words, Squares<T> squares, int count, int32_t* nearest) {
  switch (size) {
    case 4: return nearest_by<T, 4>(x, words, squares, count, nearest);
    case 8: return nearest_by<T, 8>(x, words, squares, count, nearest);
    default: return nearest_of(x, size, words, count, nearest);
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
