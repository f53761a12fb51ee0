// Vectors and tables of codewords checked once, and the search for the nearest. No pointer leaves here unchecked.
#include "bindings.hpp"
#include "search.hpp"

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

void pack(const Codes<const uint8_t>& codes, const I32<2>& place, const I32<2>& bits, const Codes<uint8_t>& out) {
  const int64_t heads = int64_t(codes.shape(0)), rows = int64_t(codes.shape(1)), count = int64_t(codes.shape(2)), bytes = int64_t(out.shape(2));
  check("place", place, {heads, count}), check("bits", bits, {heads, count}), check("out", out, {heads, rows, bytes});
  std::vector<uint8_t> widths;
  for (int64_t i = 0; i < heads * count; i++) {
    const int width = bits.data()[i], where = place.data()[i];
    if (width < 0 || width > 8) refuse("bits", "0 to 8", std::to_string(width));
    if (where < 0 || where + int64_t(width) > 8 * bytes) refuse("place", "within " + std::to_string(bytes) + " bytes", std::to_string(where));
    widths.push_back(uint8_t(width));
  }
  const Packing p{codes.data(), rows, int(count), int(bytes), place.data(), widths.data(), out.data()};
  const Searcher& now = *level().searcher;
  const std::shared_ptr<Pool> threads = the_pool();
  const int64_t chunks = (rows + CHUNK - 1) / CHUNK;
  const WithoutGil free;
  threads->run(int(heads * chunks), [&](int i, int) { now.pack(p, int(i / chunks), i % chunks * CHUNK, std::min(i % chunks * CHUNK + CHUNK, rows)); });
}

}  // namespace

void bind_search(nb::module_& m) {
  m.def("nearest", &search<float, uint8_t>, nb::arg("points"), nb::arg("words"), nb::arg("first"), nb::arg("number"), nb::arg("out"));
  m.def("nearest_double", &search<double, int32_t>, nb::arg("points"), nb::arg("words"), nb::arg("first"), nb::arg("number"), nb::arg("out"));
  m.def("pack", &pack, nb::arg("codes"), nb::arg("place"), nb::arg("bits"), nb::arg("out"));
}

}  // namespace kvtool
