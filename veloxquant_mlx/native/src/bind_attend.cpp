// Stored rows checked once, and attention to them. No pointer leaves here unchecked.
#include "bindings.hpp"
#include "stored.hpp"

namespace kvtool {
namespace {

constexpr int CHUNK = 512;  // tokens that a thread takes at a time: enough that merging their sums is nothing beside making them
constexpr int WEIGHTS = 1 << 16;  // of queries taken together, at a time: 256 KiB
constexpr int ROWS = 64;    // queries from which on chunks are longer, so that their sums take no more memory

float* aligned(std::vector<float>& memory, size_t size) {
  memory.resize(size + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

std::pair<Out3, Out2> attend(
    const F32<3>& q,
    const Stored& k,
    const Stored& v,
    int k_from,
    int v_from,
    int count,
    const Bounds& first,
    const Bounds& stop,
    const std::optional<F32<2>>& angles,
    int rope_first) {
  k.check_complete(), v.check_complete();
  k.check_span("keys", k_from, count), v.check_span("values", v_from, count);
  const int heads = k.rows.heads, rows = int(q.shape(1)), dim_v = v.rows.dim;
  check("q", q, {heads, rows, k.rows.dim});
  check("first", first, {rows}), check("stop", stop, {rows});
  if (v.rows.heads != heads) refuse("values", "of " + std::to_string(heads) + " heads", std::to_string(v.rows.heads));
  if (v.rows.mix && v.predicting() != k.predicting()) refuse("values", "predicted from the components of these keys", "others");
  Problem p{};
  p.keys = k.rows, p.values = v.rows, p.k_from = k_from, p.v_from = v_from, p.count = count;
  p.rows = rows, p.padded_rows = rows < 3 ? std::max(rows, 1) : (rows + 3) / 4 * 4;
  p.dim = (k.rows.dim + 15) / 16 * 16, p.dim_v = (dim_v + 15) / 16 * 16;
  p.q = q.data(), p.first = first.data(), p.stop = stop.data();
  if (angles) {
    p.half = int(angles->shape(1)) / 2, p.rope_first = rope_first, p.angles = angles->data();
    check("angles", *angles, {count, 2 * p.half});
    if (rope_first < 0 || rope_first + 2 * p.half > k.rows.dim) refuse("angles", "of entries within D", shape(*angles));
  }
  const std::shared_ptr<Pool> threads = the_pool();
  float* out = new float[std::max<size_t>(size_t(heads) * rows * dim_v, 1)];
  Out3 out_array = owned<Out3>(out, {size_t(heads), size_t(rows), size_t(dim_v)});
  float* lse = new float[std::max<size_t>(size_t(heads) * rows, 1)];
  Out2 lse_array = owned<Out2>(lse, {size_t(heads), size_t(rows)});
  p.out = out, p.lse = lse;
  const size_t all = size_t(heads) * p.padded_rows;
  const Level& now = level();
  const bool predicted = v.rows.mix;
  p.span = std::clamp(WEIGHTS / std::max(predicted ? heads * rows : rows, 1) / TILE * TILE, TILE, CHUNK);
  p.chunk = CHUNK * std::max(1, rows / ROWS) / p.span * p.span, p.chunks = std::max(1, (count + p.chunk - 1) / p.chunk);
  const size_t parts = all * p.chunks, scratch = predicted ? now.attend_components_scratch(p) : now.attend_scratch(p);
  std::vector<float> a, b, c, d, e, f;
  p.turned = aligned(a, all * p.dim), p.by_mean = aligned(b, all);
  p.sums = aligned(c, parts * p.dim_v), p.states = aligned(d, parts * 3);
  float* scratches = aligned(e, scratch * threads->threads());
  if (predicted) p.shared = aligned(f, size_t(p.chunks) * heads * rows * ((v.predicting() + 15) / 16 * 16));
  {
    const WithoutGil free;
    for (int head = 0; head < heads; head++) now.prepare(p, head);
    // Heads of one chunk share its angles; there must be pieces enough for all threads.
    const int together = std::clamp(heads * p.chunks / (4 * threads->threads()), 1, std::max(heads, 1));
    const int groups = (heads + together - 1) / together;
    if (predicted)
      threads->run(p.chunks, [&](int i, int thread) { now.attend_components(p, i, scratches + scratch * thread); });
    else
      threads->run(groups * p.chunks, [&](int i, int thread) {
        const int head = i % groups * together;
        now.attend(p, head, std::min(head + together, heads), i / groups, scratches + scratch * thread);
      });
    threads->run(heads, [&](int head, int) {
      now.finish(p, head);
      if (predicted) now.add_predicted(p, head);
    });
  }
  return {out_array, lse_array};
}

Out3 decode(const Stored& stored, int from, int count) {
  stored.check_complete(), stored.check_span("rows", from, count);
  if (stored.rows.mix) refuse("rows", "rows by themselves", "values predicted from keys");
  const Rows& rows = stored.rows;
  float* out = new float[std::max<size_t>(size_t(rows.heads) * count * rows.dim, 1)];
  Out3 array = owned<Out3>(out, {size_t(rows.heads), size_t(count), size_t(rows.dim)});
  const Level& now = level();
  const std::shared_ptr<Pool> threads = the_pool();
  const int chunk = CHUNK, chunks = (count + chunk - 1) / chunk;
  const WithoutGil free;
  threads->run(rows.heads * chunks, [&](int i, int) {
    const int head = i / chunks, start = i % chunks * chunk;
    now.decode(rows, head, from + start, std::min(chunk, count - start), out + (int64_t(head) * count + start) * rows.dim);
  });
  return array;
}


}  // namespace

void bind_attend(nb::module_& m) {
  nb::class_<Stored>(m, "Stored")
      .def(nb::init<int, int, int>())
      .def("floats", &Stored::floats)
      .def("codes", &Stored::codes, nb::arg("codes"), nb::arg("bits"), nb::arg("table").none())
      .def("scale", &Stored::scale)
      .def("mean", &Stored::mean)
      .def("affine", &Stored::affine)
      .def("rotation", &Stored::rotation)
      .def("components", &Stored::components)
      .def("sizes", &Stored::sizes)
      .def("basis", &Stored::basis)
      .def("mix", &Stored::mix);
  m.def("attend", &attend, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("k_from"), nb::arg("v_from"), nb::arg("count"), nb::arg("first"),
        nb::arg("stop"), nb::arg("angles").none(), nb::arg("rope_first"));
  m.def("decode", &decode);
}

}  // namespace kvtool
