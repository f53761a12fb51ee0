// Vectors and tables of codewords checked once, and the search for the nearest. No pointer leaves here unchecked.
#include "search.hpp"
#include "stored.hpp"

namespace kvtool {
namespace {

constexpr int64_t CHUNK = 512;  // vectors of each column that a thread takes at a time

template <class T>
using Points = nb::ndarray<const T, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
template <class T>
using Words = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Codes = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

template <class T, class Out>
void search(const Points<T>& points, const Words<T>& words, const I32<2>& first, const I32<2>& number, const Codes<Out>& out) {
  const int64_t groups = int64_t(points.shape(0)), count = int64_t(points.shape(1)), columns = int64_t(points.shape(2)), size = int64_t(points.shape(3));
  if (size < 1 || size > MAX_SIZE) refuse("points", "vectors of 1 to " + std::to_string(MAX_SIZE) + " entries", std::to_string(size));
  if (groups > INT32_MAX || columns > INT32_MAX) refuse("points", "of fewer groups", shape(points));
  check("words", words, {int64_t(words.shape(0)), size});
  check("first", first, {groups, columns}), check("number", number, {groups, columns}), check("out", out, {groups, count, columns});
  const int64_t most = sizeof(Out) == 1 ? 256 : INT32_MAX;
  for (int64_t i = 0; i < groups * columns; i++) {
    const int64_t from = first.data()[i], to = from + number.data()[i];
    if (from < 0 || number.data()[i] < 1 || to > int64_t(words.shape(0)) || number.data()[i] > most)
      refuse("words", "1 to " + std::to_string(most) + " within " + std::to_string(words.shape(0)), std::to_string(from) + " to " + std::to_string(to));
  }
  Search<T> s{};
  s.points = points.data(), s.count = count, s.columns = int(columns), s.size = int(size);
  s.words = words.data(), s.first = first.data(), s.number = number.data();
  if constexpr (sizeof(Out) == 1)
    s.codes = out.data();
  else
    s.nearest = out.data();
  expect_writes(out.data(), out.nbytes());
  const Searcher& now = *level().searcher;
  const std::shared_ptr<Pool> threads = the_pool();
  const int64_t chunks = (count + CHUNK - 1) / CHUNK;
  if (groups * chunks > INT32_MAX) refuse("points", "of fewer vectors", shape(points));
  const WithoutGil free;
  threads->run(int(groups * chunks), [&](int i, int) {
    const int64_t from = i % chunks * CHUNK, to = std::min(from + CHUNK, count);
    if constexpr (sizeof(T) == 4)
      now.nearest(s, int(i / chunks), from, to);
    else
      now.nearest_double(s, int(i / chunks), from, to);
  });
}

// Half the square of each of n words, and the largest square of the `number` words of each table.
template <class T>
struct SquaresOf {
  std::vector<T> half, largest;
  SquaresOf(const T* words, int64_t n, int size, const int32_t* first, int64_t tables, int number) {
    for (int64_t w = 0; w < n; w++) {
      T total = 0;
      for (int i = 0; i < size; i++) total += words[w * size + i] * words[w * size + i];
      half.push_back(total / 2);
    }
    for (int64_t t = 0; t < tables; t++) {
      T most = 0;
      for (int w = 0; w < number; w++) most = half[first[t] + w] > most ? half[first[t] + w] : most;  // NaN is never the nearest
      largest.push_back(2 * most);
    }
  }
};

// --- k-means

template <int N>
using F64 = nb::ndarray<const double, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <class T, int N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// A round: of points (G, N, size) and words (G, number, size) of each group, sums, numbers and squared differences of the points of each word.
void moments(const F64<3>& points, const F64<3>& words, const Out<double, 3>& sums, const Out<int64_t, 2>& counts, const Out<double, 2>& distances) {
  const int64_t groups = int64_t(points.shape(0)), count = int64_t(points.shape(1)), size = int64_t(points.shape(2)), number = int64_t(words.shape(1));
  if (size < 1 || size > MAX_SIZE) refuse("points", "vectors of 1 to " + std::to_string(MAX_SIZE) + " entries", std::to_string(size));
  if (number < 1 || groups * number > INT32_MAX || count > INT32_MAX) refuse("words", "1 to 2^31 of all groups", std::to_string(groups * number));
  check("words", words, {groups, number, size}), check("sums", sums, {groups, number, size});
  check("counts", counts, {groups, number}), check("distances", distances, {groups, count});
  std::vector<int32_t> nearest(size_t(groups * count)), first;
  const std::vector<int32_t> numbers(size_t(groups), static_cast<int32_t>(number));
  for (int64_t g = 0; g < groups; g++) first.push_back(int32_t(g * number));
  Search<double> s{};
  s.points = points.data(), s.count = count, s.columns = 1, s.size = int(size), s.words = words.data();
  s.first = first.data(), s.number = numbers.data(), s.nearest = nearest.data();
  const SquaresOf<double> squares(words.data(), groups * number, int(size), first.data(), groups, int(number));
  s.half = squares.half.data(), s.largest = squares.largest.data();
  const Moments m{points.data(), words.data(), count, int(number), int(size), nearest.data(), sums.data(), counts.data(), distances.data()};
  const Searcher& now = *level().searcher;
  const std::shared_ptr<Pool> threads = the_pool();
  const int64_t chunks = (count + CHUNK - 1) / CHUNK;
  if (groups * chunks > INT32_MAX) refuse("points", "of fewer vectors", shape(points));
  const WithoutGil free;
  threads->run(int(groups * chunks), [&](int i, int) {
    now.nearest_double(s, int(i / chunks), i % chunks * CHUNK, std::min<int64_t>(i % chunks * CHUNK + CHUNK, count));
  });
  threads->run(int(groups), [&](int g, int) { now.accumulate(m, g); });
}

// --- rows of floats

Rows floats_of(const Stored& x) {
  x.check_complete();
  if (x.rows.type > Type::BFLOAT16) refuse("x", "rows of floats", "codes");
  return x.rows;
}

template <class Item>
void in_chunks(const Rows& x, const Item& item) {
  const std::shared_ptr<Pool> threads = the_pool();
  const int chunks = (x.count + int(CHUNK) - 1) / int(CHUNK);
  const WithoutGil free;
  threads->run(x.heads * chunks, [&](int i, int) {
    const int from = i % chunks * int(CHUNK);
    item(i / chunks, from, std::min(int(CHUNK), x.count - from));
  });
}

void code_runs(
    const Stored& x, float unit, const std::optional<F32<2>>& divisor, const std::optional<Bounds>& order, int bits, const F32<2>& words,
    const I32<2>& first, int number, const Codes<uint8_t>& codes) {
  RunCoding c{};
  c.x = floats_of(x), c.unit = unit, c.size = int(words.shape(1)), c.number = number, c.bits = bits;
  const int dim = c.x.dim;
  if (c.size < 1 || c.size > 8 || dim % c.size) refuse("words", "of 1 to 8 entries that divide D", shape(words));
  if (bits < 1 || bits > 8 || number < 1 || number > 1 << bits) refuse("number", "1 to 2^bits, of 1 to 8 bits", std::to_string(number));
  c.runs = dim / c.size, c.bytes = (int64_t(c.runs) * bits + 7) / 8;
  check("first", first, {c.x.heads, c.runs}), check("codes", codes, {c.x.heads, c.x.count, c.bytes});
  for (int64_t i = 0; i < int64_t(c.x.heads) * c.runs; i++)
    if (first.data()[i] < 0 || first.data()[i] > int64_t(words.shape(0)) - number)
      refuse("first", "of tables within " + std::to_string(words.shape(0)), std::to_string(first.data()[i]));
  if (divisor) {
    check("divisor", *divisor, {c.x.heads, dim}), c.divisor = divisor->data();
    if (dim & (dim - 1)) refuse("divisor", "that of rows of 2^k entries", std::to_string(dim));
  }
  if (order) {
    check("order", *order, {dim}), c.order = order->data();
    for (int i = 0; i < dim; i++)
      if (c.order[i] < 0 || c.order[i] >= dim) refuse("order", "of entries below " + std::to_string(dim), std::to_string(c.order[i]));
  }
  const SquaresOf<float> squares(words.data(), int64_t(words.shape(0)), c.size, first.data(), int64_t(c.x.heads) * c.runs, number);
  c.half = squares.half.data(), c.largest = squares.largest.data();
  c.words = words.data(), c.first = first.data(), c.codes = codes.data();
  expect_writes(codes.data(), codes.nbytes());
  const Searcher& now = *level().searcher;
  in_chunks(c.x, [&](int head, int from, int count) { now.runs(c, head, from, count); });
}

void code_planes(
    const Stored& x, const F32<2>& mean, const I32<2>& planes, const F32<3>& turn, const F32<2>& words, const I32<2>& bits, const I32<1>& kept,
    const Codes<uint8_t>& codes) {
  PlaneCoding c{};
  c.x = floats_of(x);
  const int heads = c.x.heads, dim = c.x.dim, half = dim / 2;
  if (dim % 2) refuse("x", "of an even D", std::to_string(dim));
  check("mean", mean, {heads, dim}), check("planes", planes, {2, half}), check("turn", turn, {heads, half, 3}), check("bits", bits, {heads, half});
  check("kept", kept, {heads}), check("words", words, {int64_t(words.shape(0)), 2}), check("codes", codes, {heads, c.x.count, int64_t(codes.shape(2))});
  for (int i = 0; i < dim; i++)
    if (planes.data()[i] < 0 || planes.data()[i] >= dim) refuse("planes", "of entries below " + std::to_string(dim), std::to_string(planes.data()[i]));
  std::vector<uint8_t> widths;
  std::vector<int32_t> place;
  c.bytes = int64_t(codes.shape(2));
  for (int h = 0; h < heads; h++) {
    int at = 1;
    widths.push_back(1), place.push_back(0);  // the flag
    for (int p = 0; p < half; p++) {
      const int width = bits.data()[h * half + p];
      if (width < 0 || width > 8 || (width && (int64_t(2) << width) - 1 > int64_t(words.shape(0))))
        refuse("bits", "0 to 8, of words within " + std::to_string(words.shape(0)), std::to_string(width));
      widths.push_back(uint8_t(width)), place.push_back(at);
      at += width;
    }
    if (at > 8 * c.bytes) refuse("codes", "of rows of " + std::to_string(at) + " bits", std::to_string(8 * c.bytes));
  }
  c.mean = mean.data(), c.planes = planes.data(), c.turn = turn.data(), c.words = words.data(), c.kept = kept.data(), c.codes = codes.data();
  c.bits = widths.data(), c.place = place.data();
  expect_writes(codes.data(), codes.nbytes());
  const Searcher& now = *level().searcher;
  in_chunks(c.x, [&](int head, int from, int count) { now.planes(c, head, from, count); });
}

void farness(const Stored& x, const F32<2>& middle, const F32<2>& inverse, const Out<float, 2>& out) {
  const Farness f{floats_of(x), middle.data(), inverse.data(), out.data()};
  check("middle", middle, {f.x.heads, f.x.dim}), check("inverse", inverse, {f.x.heads, f.x.dim}), check("out", out, {f.x.heads, f.x.count});
  const Searcher& now = *level().searcher;
  in_chunks(f.x, [&](int head, int from, int count) { now.farness(f, head, from, count); });
}

}  // namespace

void bind_search(nb::module_& m) {
  m.def("nearest", &search<float, uint8_t>, nb::arg("points"), nb::arg("words"), nb::arg("first"), nb::arg("number"), nb::arg("out"));
  m.def("nearest_double", &search<double, int32_t>, nb::arg("points"), nb::arg("words"), nb::arg("first"), nb::arg("number"), nb::arg("out"));
  m.def("moments", &moments, nb::arg("points"), nb::arg("words"), nb::arg("sums"), nb::arg("counts"), nb::arg("distances"));
  m.def("code_runs", &code_runs, nb::arg("x"), nb::arg("unit"), nb::arg("divisor").none(), nb::arg("order").none(), nb::arg("bits"),
        nb::arg("words"), nb::arg("first"), nb::arg("number"), nb::arg("codes"));
  m.def("code_planes", &code_planes, nb::arg("x"), nb::arg("mean"), nb::arg("planes"), nb::arg("turn"), nb::arg("words"), nb::arg("bits"),
        nb::arg("kept"), nb::arg("codes"));
  m.def("farness", &farness, nb::arg("x"), nb::arg("middle"), nb::arg("inverse"), nb::arg("out"));
}

}  // namespace kvtool
