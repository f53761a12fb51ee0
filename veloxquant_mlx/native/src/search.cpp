// The nearest codeword of each vector, at one SIMD level; compiled once for each.
//
// Squared differences are summed in the order of the entries, and no product is contracted with a sum (CMakeLists.txt): every level gives
// the same codes. Vectors are in the lanes, for a codeword is the same for all of them.
#include "search.hpp"

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

template <class T>
void search(const Search<T>& s, int group, int64_t from, int64_t to) {
  T x[MAX_SIZE * AT_ONCE];
  int32_t nearest[AT_ONCE];
  for (int64_t at = from; at < to; at += AT_ONCE) {
    const int vectors = int(to - at < AT_ONCE ? to - at : AT_ONCE);
    for (int column = 0; column < s.columns; column++) {
      const int64_t table = int64_t(group) * s.columns + column;
      const T* points = s.points + ((group * s.count + at) * s.columns + column) * s.size;
      for (int n = 0; n < AT_ONCE; n++)
        for (int i = 0; i < s.size; i++) x[i * AT_ONCE + n] = n < vectors ? points[n * s.columns * s.size + i] : 0;
      nearest_of(x, s.size, s.words + int64_t(s.first[table]) * s.size, s.number[table], nearest);
      const int64_t out = (group * s.count + at) * s.columns + column;
      for (int n = 0; n < vectors; n++) {
        if (s.codes) s.codes[out + n * s.columns] = uint8_t(nearest[n]);
        if (s.nearest) s.nearest[out + n * s.columns] = nearest[n];
      }
    }
  }
}

void pack_codes(const Packing& p, int head, int64_t from, int64_t to) {
  const int32_t* place = p.place + int64_t(head) * p.count;
  const uint8_t* bits = p.bits + int64_t(head) * p.count;
  for (int64_t t = from; t < to; t++) {
    const uint8_t* codes = p.codes + (head * p.rows + t) * p.count;
    uint8_t* out = p.out + (head * p.rows + t) * p.bytes;
    memset(out, 0, p.bytes);
    for (int i = 0; i < p.count; i++) {
      if (!bits[i]) continue;
      const uint32_t code = (codes[i] & ((1u << bits[i]) - 1)) << (place[i] % 8);
      uint8_t* at = out + place[i] / 8;
      at[0] |= uint8_t(code);
      if (place[i] % 8 + bits[i] > 8) at[1] |= uint8_t(code >> 8);
    }
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE

#define KVTOOL_SEARCHER_(x) x##_searcher
#define KVTOOL_SEARCHER(x) KVTOOL_SEARCHER_(x)
extern const Searcher KVTOOL_SEARCHER(KVTOOL_LEVEL);
const Searcher KVTOOL_SEARCHER(KVTOOL_LEVEL) = {KVTOOL_INSIDE::search<float>, KVTOOL_INSIDE::search<double>, KVTOOL_INSIDE::pack_codes};

}  // namespace kvtool
