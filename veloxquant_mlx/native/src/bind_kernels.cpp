// Arguments of the kernel API's functions, checked once. No pointer leaves here unchecked.
#include <stdexcept>

#include "bindings.hpp"
#include "kernels.hpp"

namespace kvtool {
namespace {

constexpr int64_t CHUNK = 1 << 16;  // values that a thread takes at a time, or so

const Kernels& kernels() {
  const Level* now = &level();
#ifdef KVTOOL_X86
  if (now == &avx512) return avx512_kernels;
  if (now == &avx2) return avx2_kernels;
#endif
#ifdef KVTOOL_ARM64
  if (now == &neon) return neon_kernels;
#endif
  return now == &baseline ? baseline_kernels : throw std::logic_error("a level without kernels");
}

template <class T, int N>
using Dense = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

void hamming(
    const Dense<const uint8_t, 1>& query, const Dense<const uint8_t, 2>& bits, const F32<1>& offsets, float scale, const Flat<float>& out) {
  const int64_t rows = int64_t(bits.shape(0)), width = int64_t(query.shape(0));
  if (width < 1 || width > INT32_MAX) refuse("query", "of 1 to 2^31 - 1 bytes", std::to_string(width));
  check("bits", bits, {rows, width}), check("offsets", offsets, {rows}), check("out", out, {rows});
  const Hamming h{query.data(), bits.data(), int(width), offsets.data(), scale, out.data()};
  const Kernels& now = kernels();
  in_parts(rows, std::max<int64_t>(1, CHUNK / width), 1, [&](int64_t from, int64_t to) { now.hamming(h, from, to); });
}

void sign_scores(const F32<2>& q, const Dense<const uint8_t, 3>& packed, const F32<2>& norms, float factor, const Dense<float, 2>& out) {
  const int64_t slots = int64_t(packed.shape(0)), heads = int64_t(q.shape(0)), width = int64_t(packed.shape(2));
  if (heads < 1 || heads > INT32_MAX || width < 1 || width > INT32_MAX / 8) refuse("q", "(H, m) of 8 entries or more", shape(q));
  check("q", q, {heads, 8 * width}), check("packed", packed, {slots, heads, width});
  check("norms", norms, {slots, heads}), check("out", out, {heads, slots});
  const SignScores s{q.data(), packed.data(), norms.data(), int(heads), int(width), slots, factor, out.data()};
  const Kernels& now = kernels();
  const int64_t each = std::max<int64_t>(256, CHUNK / width), parts = (slots + each - 1) / each;
  in_parts(heads * parts, 1, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) now.sign_scores(s, int(i / parts), i % parts * each, std::min(i % parts * each + each, slots));
  });
}

void project(const Values1& x, bool bfloat, const F32<2>& filters, int sign, const Dense<float, 2>& out) {
  const int64_t groups = int64_t(out.shape(0)), rows = int64_t(out.shape(1)), dim = int64_t(filters.shape(1));
  if (dim < 1 || dim > INT32_MAX) refuse("filters", "(G, D) with D at least 1", shape(filters));
  check("filters", filters, {groups, dim}), check("x", x, {groups * rows * dim});
  const Projected p{reals("x", x, bfloat), rows, int(dim), sign, filters.data(), out.data()};
  const Kernels& now = kernels();
  in_parts(groups * rows, std::max<int64_t>(1, CHUNK / dim), 1, [&](int64_t from, int64_t to) { now.project(p, from, to); });
}

void round_trip(
    const Values1& x, bool bfloat, int64_t length, int64_t inner, int64_t group, float levels, float eps,
    const nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>& out) {
  if (length < 1 || inner < 1 || group < 1 || group > length)
    refuse("group", "1 to the axis " + std::to_string(length), std::to_string(group));
  const int64_t outer = int64_t(x.shape(0)) / length / inner;
  check("x", x, {outer * length * inner}), check("out", out, {int64_t(x.shape(0))});
  if (out.nbytes() != x.nbytes()) refuse("out", "as wide as x", std::to_string(out.nbytes()) + " bytes");
  const RoundTrip r{reals("x", x, bfloat), length, inner, group, levels, eps, static_cast<uint8_t*>(out.data())};
  const Kernels& now = kernels();
  const int64_t groups = outer * ((length + group - 1) / group);
  in_parts(groups, std::max<int64_t>(1, CHUNK / (group * inner)), 1, [&](int64_t from, int64_t to) { now.round_trip(r, from, to); });
}

void gather(const Values1& indices, const Dense<const uint8_t, 2>& table, const Dense<uint8_t, 2>& out) {
  const int64_t count = int64_t(indices.shape(0)), entries = int64_t(table.shape(0)), width = int64_t(table.shape(1));
  const auto type = indices.dtype();
  if (type.code != uint8_t(nb::dlpack::dtype_code::UInt) || (type.bits != 8 && type.bits != 16 && type.bits != 32))
    refuse("indices", "uint8, uint16 or uint32", std::to_string(type.bits) + " bits");
  if (entries < 1 || width < 1) refuse("table", "of one entry or more", shape(table));
  check("out", out, {count, width});
  expect_writes(out.data(), out.nbytes());
  const Gather g{static_cast<const uint8_t*>(indices.data()), type.bits / 8, table.data(), entries, width, out.data()};
  const Kernels& now = kernels();
  in_parts(count, std::max<int64_t>(1, CHUNK / width), 1, [&](int64_t from, int64_t to) { now.gather(g, from, to); });
}

// Groups, and of each a row within `rows` of which others are left.
int64_t check_gone(const I32<1>& gone, int64_t rows) {
  if (rows < 2) refuse("rows", "2 or more of a group", std::to_string(rows));
  for (size_t g = 0; g < gone.size(); g++)
    if (gone.data()[g] < 0 || gone.data()[g] >= rows) refuse("gone", "rows within " + std::to_string(rows), std::to_string(gone.data()[g]));
  return int64_t(gone.size());
}

void drop_row(const Dense<const uint8_t, 3>& x, const I32<1>& gone, const Dense<uint8_t, 3>& out) {
  const int64_t rows = int64_t(x.shape(1)), width = int64_t(x.shape(2)), groups = check_gone(gone, rows);
  check("x", x, {groups, rows, width}), check("out", out, {groups, rows - 1, width});
  const DropRow d{x.data(), rows, width, gone.data(), out.data()};
  const Kernels& now = kernels();
  const int64_t each = CHUNK / std::max<int64_t>(1, std::min(width, CHUNK));
  in_parts(groups * (rows - 1), each, 1, [&](int64_t from, int64_t to) { now.drop_row(d, from, to); });
}

void turn_back(
    const Values1& x, bool bfloat, const I32<1>& gone, const I32<2>& positions, const F32<2>& turn, const Dense<uint8_t, 3>& out) {
  const int64_t rows = int64_t(positions.shape(1)), groups = check_gone(gone, rows), dim = 2 * int64_t(turn.shape(1));
  if (dim < 2 || dim > INT32_MAX) refuse("turn", "(2, D / 2) with D at least 2", shape(turn));
  check("positions", positions, {groups, rows}), check("turn", turn, {2, dim / 2}), check("x", x, {groups * rows * dim});
  check("out", out, {groups, rows - 1, dim * int64_t(x.itemsize())});
  const TurnBack t{reals("x", x, bfloat), rows, int(dim), gone.data(), positions.data(), turn.data(), out.data()};
  const Kernels& now = kernels();
  in_parts(groups * (rows - 1), std::max<int64_t>(1, CHUNK / dim), 1, [&](int64_t from, int64_t to) { now.turn_back(t, from, to); });
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("hamming", &hamming, nb::arg("query"), nb::arg("bits"), nb::arg("offsets"), nb::arg("scale"), nb::arg("out"));
  m.def("sign_scores", &sign_scores, nb::arg("q"), nb::arg("packed"), nb::arg("norms"), nb::arg("factor"), nb::arg("out"));
  m.def("project", &project, nb::arg("x"), nb::arg("bfloat"), nb::arg("filters"), nb::arg("sign"), nb::arg("out"));
  m.def(
      "round_trip", &round_trip, nb::arg("x"), nb::arg("bfloat"), nb::arg("length"), nb::arg("inner"), nb::arg("group"), nb::arg("levels"),
      nb::arg("eps"), nb::arg("out"));
  m.def("drop_row", &drop_row, nb::arg("x"), nb::arg("gone"), nb::arg("out"));
  m.def(
      "turn_back", &turn_back, nb::arg("x"), nb::arg("bfloat"), nb::arg("gone"), nb::arg("positions"), nb::arg("turn"), nb::arg("out"));
  m.def("gather", &gather, nb::arg("indices"), nb::arg("table"), nb::arg("out"));
}

}  // namespace kvtool
