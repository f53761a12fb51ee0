// The nearest codeword of each vector, at one SIMD level; compiled once for each.
//
// Squared differences are summed in the order of the entries, and no product is contracted with a sum (CMakeLists.txt): every level gives
// the same codes.
#include "search.hpp"

#include "nearest.hpp"
#include "search_rows.hpp"
#include "simd.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

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
      const T* words = s.words + int64_t(s.first[table]) * s.size;
      if (s.half)
        nearest_of(x, s.size, words, Squares<T>{s.half + s.first[table], s.largest[table]}, s.number[table], nearest);
      else
        nearest_of(x, s.size, words, s.number[table], nearest);
      const int64_t out = (group * s.count + at) * s.columns + column;
      for (int n = 0; n < vectors; n++) {
        if (s.codes) s.codes[out + n * s.columns] = uint8_t(nearest[n]);
        if (s.nearest) s.nearest[out + n * s.columns] = nearest[n];
      }
    }
  }
}

// Sums and numbers of the points that each word is nearest to, in their order, and squared differences.
void accumulate(const Moments& m, int group) {
  const double* points = m.points + group * m.count * m.size;
  const double* words = m.words + int64_t(group) * m.number * m.size;
  double* sums = m.sums + int64_t(group) * m.number * m.size;
  int64_t* counts = m.counts + int64_t(group) * m.number;
  memset(sums, 0, sizeof(double) * m.number * m.size), memset(counts, 0, sizeof(int64_t) * m.number);
  for (int64_t n = 0; n < m.count; n++, points += m.size) {
    const int64_t word = m.nearest[group * m.count + n];
    double total = 0;
    for (int i = 0; i < m.size; i++) {
      const double apart = points[i] - words[word * m.size + i];
      total += apart * apart, sums[word * m.size + i] += points[i];
    }
    counts[word]++, m.distances[group * m.count + n] = total;
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE

#define KVTOOL_SEARCHER_(x) x##_searcher
#define KVTOOL_SEARCHER(x) KVTOOL_SEARCHER_(x)
extern const Searcher KVTOOL_SEARCHER(KVTOOL_LEVEL);
const Searcher KVTOOL_SEARCHER(KVTOOL_LEVEL) = {
    KVTOOL_INSIDE::search<float>, KVTOOL_INSIDE::search<double>, KVTOOL_INSIDE::accumulate,
    KVTOOL_INSIDE::code_runs,     KVTOOL_INSIDE::code_planes,    KVTOOL_INSIDE::far_from};

}  // namespace kvtool
