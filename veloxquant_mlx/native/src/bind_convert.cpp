// Stored rows to rows of a cache, and rows from one rotary embedding to another, written where the caller says.
#include "stored.hpp"

namespace kvtool {
namespace {

constexpr int CHUNK = 256;  // tokens of a head that a thread takes at a time

using Given = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Written = nb::ndarray<nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Factor = std::tuple<Doubles, Doubles, Bounds, Bounds>;

// Type of 16-bit words, or of float32.
template <class A>
Type type_of(const std::string& name, const A& array, bool bfloat) {
  if (array.dtype() == nb::dtype<float>() && !bfloat) return Type::FLOAT32;
  if (array.dtype() == nb::dtype<uint16_t>()) return bfloat ? Type::BFLOAT16 : Type::FLOAT16;
  refuse(name, "float32, or 16-bit floats as uint16", std::to_string(array.dtype().bits) + " bits of type code " + std::to_string(array.dtype().code));
}

void decode_as(const Stored& stored, int from, const Written& out, bool bfloat, const std::optional<Tables>& angles, int first, bool interleaved) {
  const int count = int(out.shape(1)), heads = stored.rows.heads;
  stored.check_complete(), stored.check_span("rows", from, count);
  if (stored.rows.mix) refuse("rows", "rows by themselves", "values predicted from keys");
  check("out", out, {heads, count, stored.rows.dim});
  const AngleTables tables(angles, count, first, stored.rows.dim);
  Decoding d{};
  d.rows = stored.rows, d.from = from, d.count = count, d.type = type_of("out", out, bfloat);
  d.out = static_cast<uint8_t*>(out.data()), d.angles = tables.view, d.rope_first = first, d.interleaved = interleaved;
  expect_writes(out.data(), out.nbytes());
  const int chunks = (count + CHUNK - 1) / CHUNK;
  const Level& now = level();
  const std::shared_ptr<Pool> threads = the_pool();
  const WithoutGil free;
  // Heads of one chunk lie beside each other, for they share its angles.
  threads->run(heads * chunks, [&](int i, int) {
    const int start = i / heads * CHUNK;
    now.decode_as(d, i % heads, start, std::min(start + CHUNK, count));
  });
}

void turn(
    const Given& x,
    const Written& out,
    bool bfloat,
    int first,
    int half,
    bool paired_in,
    bool paired_out,
    const std::optional<Tables>& undo,
    const std::optional<Tables>& redo,
    const std::vector<Factor>& phases,
    float ratio) {
  const int heads = int(x.shape(0)), count = int(x.shape(1)), dim = int(x.shape(2));
  check("out", out, {heads, count, dim});
  Turning t{};
  t.type = type_of("out", out, bfloat);
  if (type_of("x", x, bfloat) != t.type) refuse("x", "of the type of out", std::to_string(x.dtype().bits) + " bits");
  if (dim > MAX_DIM) refuse("x", "(H, S, D) with D at most " + std::to_string(MAX_DIM), shape(x));
  if (dim > 1 && x.stride(2) != 1) refuse("x", "contiguous along the last axis", "stride " + std::to_string(x.stride(2)));
  if (first < 0 || half < 0 || half > dim / 2 || first > dim - 2 * half)
    refuse("half", "of entries within D = " + std::to_string(dim), std::to_string(first) + " to " + std::to_string(first + 2 * int64_t(half)));
  const AngleTables back(undo, count, first, dim), forth(redo, count, first, dim);
  for (const Angles& a : {back.view, forth.view})
    if (a.pages && a.half != half) refuse("angles", "of " + std::to_string(half) + " pairs", std::to_string(a.half));
  if (phases.empty() && !undo && !redo) refuse("undo", "given, or redo, or phases", "none");
  if (phases.size() > 2) refuse("phases", "at most two", std::to_string(phases.size()));
  for (size_t i = 0; i < phases.size(); i++) {
    const auto& [hi, lo, index, low] = phases[i];
    const int64_t entries = int64_t(hi.shape(0)), within = int64_t(lo.shape(0));
    check("hi", hi, {entries, 2 * half}), check("lo", lo, {within, 2 * half}), check("index", index, {count}), check("low", low, {count});
    for (int s = 0; s < count; s++)
      if (index.data()[s] < 0 || index.data()[s] >= entries || low.data()[s] < 0 || low.data()[s] >= within)
        refuse("index", "within its table", std::to_string(index.data()[s]) + ", " + std::to_string(low.data()[s]));
    t.phases[i] = {hi.data(), lo.data(), index.data(), low.data()};
  }
  const int64_t size = x.dtype().bits / 8;
  t.heads = heads, t.count = count, t.dim = dim, t.first = first, t.half = half, t.paired_in = paired_in, t.paired_out = paired_out;
  t.x = static_cast<const uint8_t*>(x.data()), t.head = x.stride(0) * size, t.row = x.stride(1) * size;
  t.out = static_cast<uint8_t*>(out.data()), t.undo = back.view, t.redo = forth.view, t.ratio = ratio;
  expect_writes(out.data(), out.nbytes());
  const Level& now = level();
  const std::shared_ptr<Pool> threads = the_pool();
  const WithoutGil free;
  // Threads go through stretches of their own: two that write a large page for the first time at once would both clear it.
  const int tiles = (count + TILE - 1) / TILE, stretches = threads->threads(), each = (tiles + stretches - 1) / stretches;
  threads->run(stretches * each, [&](int i, int) {
    const int tile = i % stretches * each + i / stretches;
    if (tile < tiles) now.turn(t, tile * TILE, std::min((tile + 1) * TILE, count));
  });
}

}  // namespace

void bind_convert(nb::module_& m) {
  m.def("decode_as", &decode_as, nb::arg("stored"), nb::arg("start"), nb::arg("out"), nb::arg("bfloat"), nb::arg("angles").none(),
        nb::arg("first"), nb::arg("interleaved"));
  m.def("turn", &turn, nb::arg("x"), nb::arg("out"), nb::arg("bfloat"), nb::arg("first"), nb::arg("half"), nb::arg("paired_in"),
        nb::arg("paired_out"), nb::arg("undo").none(), nb::arg("redo").none(), nb::arg("phases"), nb::arg("ratio"));
}

}  // namespace kvtool
