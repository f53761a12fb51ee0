// What every file of bindings shares: arrays as they come from Python, refusals, the pool and the SIMD level in use.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pool.hpp"
#include "problem.hpp"

namespace nb = nanobind;

namespace kvtool {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu>;
using Floats = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
template <int N>
using Words = nb::ndarray<const uint16_t, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using F32 = nb::ndarray<const float, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using I32 = nb::ndarray<const int32_t, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using I64 = nb::ndarray<const int64_t, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Bounds = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Values1 = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Out3 = nb::ndarray<nb::numpy, float, nb::ndim<3>>;
using Out2 = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

[[noreturn]] inline void refuse(const std::string& name, const std::string& must, const std::string& got) {
  throw nb::value_error(("[native] " + name + " must be " + must + ", but got " + got + ".").c_str());
}

template <class A>
std::string shape(const A& array) {
  std::string text = "(";
  for (size_t i = 0; i < array.ndim(); i++) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + ")";
}

template <class A>
void check(const std::string& name, const A& array, std::vector<int64_t> wanted) {
  bool same = array.ndim() == wanted.size();
  for (size_t i = 0; same && i < wanted.size(); i++) same = int64_t(array.shape(i)) == wanted[i];
  if (same) return;
  std::string text = "(";
  for (size_t i = 0; i < wanted.size(); i++) text += (i ? ", " : "") + std::to_string(wanted[i]);
  refuse(name, text + ")", shape(array));
}

// Values as they come from Python: float32, float16, or with `bfloat` uint16 of bfloat16.
inline Reals reals(const char* name, const Values1& x, bool bfloat) {
  const auto type = x.dtype();
  const bool word = type == nb::dtype<uint16_t>(), real = type == nb::dtype<float>();
  const bool half = type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16;
  if (!(bfloat ? word : real || half)) refuse(name, bfloat ? "uint16 of bfloat16" : "float16 or float32", std::to_string(type.bits) + " bits");
  return {bfloat ? Type::BFLOAT16 : real ? Type::FLOAT32 : Type::FLOAT16, static_cast<const uint8_t*>(x.data())};
}

template <class Array>
Array owned(float* data, std::initializer_list<size_t> sizes) {
  return Array(data, sizes, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<float*>(p); }));
}

// Tables of cosines and sines as they come from Python: pages of as many rows each, and the row of the first page to begin at.
using Tables = std::pair<std::vector<F32<2>>, int>;

// Tables, checked once.
class AngleTables {
 public:
  // Of `count` rows, of which RoPE turns entries rope_first to rope_first + dims, of dim.
  AngleTables(const std::optional<Tables>& tables, int count, int rope_first, int dim) {
    if (!tables) return;
    const auto& [pages, first] = *tables;
    if (pages.empty()) refuse("angles", "of at least one page", "none");
    const int64_t each = int64_t(pages[0].shape(0)), dims = int64_t(pages[0].shape(1));
    for (const auto& page : pages) check("angles", page, {each, dims}), pages_.push_back(page.data());
    const int64_t rows = each * int64_t(pages.size());
    if (each < 1 || first < 0 || first + int64_t(count) > rows || rows > INT32_MAX)
      refuse("angles", "rows within " + std::to_string(rows), std::to_string(first) + " to " + std::to_string(int64_t(first) + count));
    if (dims % 2 || rope_first < 0 || dims > dim || rope_first > dim - dims)
      refuse("angles", "of entries within D = " + std::to_string(dim), std::to_string(rope_first) + " to " + std::to_string(rope_first + dims));
    view = {pages_.data(), int(each), first, int(dims) / 2};
  }
  AngleTables(const AngleTables&) = delete;
  AngleTables& operator=(const AngleTables&) = delete;

  Angles view{};

 private:
  std::vector<const float*> pages_;
};

// Large memory that is about to be written whole may come in large pages: a fault for each 4 KiB takes longer than what is written.
void expect_writes(void* data, size_t bytes);

// The GIL is another's within. A thread that takes it back from an interpreter that ends is unwound through frames that must not be, which
// aborts the process: so the end waits for those within, and whoever comes later stays here.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

const Level& level();           // in use
std::shared_ptr<Pool> the_pool();

// Calls some(from, to) on the pool for parts of `count`, each of about `each` and a multiple of `together` but for the last.
template <class Some>
void in_parts(int64_t count, int64_t each, int64_t together, const Some& some) {
  const int64_t least = std::max<int64_t>(1, each / together) * together;
  const int64_t size = std::max(least, (count / INT32_MAX + 1) / together * together);
  const std::shared_ptr<Pool> threads = the_pool();
  const WithoutGil free;
  threads->run(int((count + size - 1) / size), [&](int i, int) { some(i * size, std::min(i * size + size, count)); });
}

void bind_attend(nb::module_& m);
void bind_encode(nb::module_& m);
void bind_convert(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_search(nb::module_& m);
void bind_streams(nb::module_& m);
void bind_calibrated(nb::module_& m);

}  // namespace kvtool
