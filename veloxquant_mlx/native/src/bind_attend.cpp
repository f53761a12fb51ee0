// Stored rows checked once, and attention to them. No pointer leaves here unchecked.
#include "bindings.hpp"

namespace kvtool {
namespace {

constexpr int CHUNK = 512;  // tokens that a thread takes at a time: enough that merging their sums is nothing beside making them
constexpr int ROWS = 64;    // queries from which on chunks are longer, so that their sums take no more memory

// The arrays that a `Rows` points into live as long as it does.
class Stored {
 public:
  Rows rows{};

  Stored(int heads, int count, int dim) {
    if (heads < 0 || count < 0 || dim < 1 || dim > MAX_DIM)
      refuse("shape", "(H, S, D) with D at most " + std::to_string(MAX_DIM), "(" + std::to_string(heads) + ", " + std::to_string(count) + ", " + std::to_string(dim) + ")");
    rows.heads = heads, rows.count = count, rows.dim = dim;
  }

  void floats(const Floats& data, bool bfloat) {
    check("data", data, {rows.heads, rows.count, rows.dim});
    const auto type = data.dtype();
    const bool word = type == nb::dtype<uint16_t>(), real = type == nb::dtype<float>();
    const bool half = type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16;
    if (!(bfloat ? word : real || half) || (data.shape(2) > 1 && data.stride(2) != 1))
      refuse("data", bfloat ? "uint16 of bfloat16, D contiguous" : "float16 or float32, D contiguous", std::to_string(type.bits) + " bits");
    rows.type = bfloat ? Type::BFLOAT16 : real ? Type::FLOAT32 : Type::FLOAT16;
    const int64_t size = type.bits / 8;
    rows.data = static_cast<const uint8_t*>(data.data()), rows.head = data.stride(0) * size, rows.row = data.stride(1) * size;
    data_ = data;
  }

  void codes(const Bytes& codes, int bits, const std::optional<std::vector<float>>& table) {
    if (bits < 1 || bits > 8) refuse("bits", "1 to 8", std::to_string(bits));
    if (rows.stages == 2) refuse("codes", "given for one or two stages", "a third");
    check("codes", codes, {rows.heads, rows.count, (int64_t(rows.dim) * bits + 7) / 8});
    if (codes.shape(2) > 1 && codes.stride(2) != 1) refuse("codes", "contiguous along the last axis", "stride " + std::to_string(codes.stride(2)));
    Stage& stage = rows.stage[rows.stages];
    const int64_t last = (rows.heads - 1) * codes.stride(0) + (rows.count - 1) * codes.stride(1) + int64_t(codes.shape(2));
    if (codes.size() && (codes.stride(0) < 0 || codes.stride(1) < 0)) refuse("codes", "of ascending strides", "negative ones");
    stage = {codes.data(), codes.data() + (codes.size() ? last : 0), codes.stride(0), codes.stride(1), bits, nullptr};
    if (table) {
      if (table->size() != size_t(1) << bits) refuse("table", std::to_string(1 << bits) + " values", std::to_string(table->size()));
      std::vector<float>& values = tables_[rows.stages];
      values.resize(std::max<size_t>(16, table->size()));
      for (size_t i = 0; i < values.size(); i++) values[i] = (*table)[i % table->size()];
      stage.table = values.data();
    }
    codes_[rows.stages++] = codes;
    rows.type = Type::CODES;
  }

  void scale(const Words<2>& scale) {
    check("scale", scale, {rows.heads, rows.count});
    rows.scale = scale.data(), scale_ = scale;
  }

  void mean(const F32<2>& mean) {
    check("mean", mean, {rows.heads, rows.dim});
    rows.mean = mean.data(), mean_ = mean;
  }

  void affine(const Words<3>& step, const Words<3>& zero, int group, bool by_token) {
    if (group < 1) refuse("group", "at least 1", std::to_string(group));
    auto groups = [&](int64_t size) { return (size + group - 1) / group; };
    const std::vector<int64_t> sides = by_token ? std::vector<int64_t>{rows.heads, rows.count, groups(rows.dim)}
                                                : std::vector<int64_t>{rows.heads, groups(rows.count), rows.dim};
    check("step", step, sides), check("zero", zero, sides);
    rows.step = step.data(), rows.zero = zero.data(), rows.group = group, rows.by_token = by_token, step_ = step, zero_ = zero;
  }

  void rotation(const F32<1>& signs, const F32<2>& hartley) {
    check("signs", signs, {rows.dim});
    const int odd = int(hartley.shape(0)), power = odd ? rows.dim / odd : 0;
    check("hartley", hartley, {odd, odd});
    if (odd < 1 || odd * power != rows.dim || (power & (power - 1))) refuse("hartley", "(m, m) with D = m 2^k", shape(hartley));
    rows.signs = signs.data(), rows.hartley = hartley.data(), rows.odd = odd, signs_ = signs, hartley_ = hartley;
  }

  void check_complete() const {
    if (rows.type == Type::CODES ? !rows.stages : !rows.data && rows.count) refuse("rows", "given their codes or floats", "none");
    if (rows.signs && !rows.scale) refuse("rotation", "that of rows with a scale", "no scale");
    if (rows.mean && !rows.scale) refuse("mean", "that of rows with a scale", "no scale");
  }

  void check_span(const char* name, int from, int count) const {
    if (from < 0 || count < 0 || from > rows.count - count)
      refuse(name, "rows within " + std::to_string(rows.count), std::to_string(from) + " to " + std::to_string(int64_t(from) + count));
  }

 private:
  Floats data_;
  Bytes codes_[2];
  std::vector<float> tables_[2];
  Words<2> scale_;
  Words<3> step_, zero_;
  F32<2> mean_, hartley_;
  F32<1> signs_;
};

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
  p.chunk = CHUNK * std::max(1, rows / ROWS), p.chunks = std::max(1, (count + p.chunk - 1) / p.chunk);

  float* out = new float[std::max<size_t>(size_t(heads) * rows * dim_v, 1)];
  Out3 out_array = owned<Out3>(out, {size_t(heads), size_t(rows), size_t(dim_v)});
  float* lse = new float[std::max<size_t>(size_t(heads) * rows, 1)];
  Out2 lse_array = owned<Out2>(lse, {size_t(heads), size_t(rows)});
  p.out = out, p.lse = lse;
  const size_t all = size_t(heads) * p.padded_rows, parts = all * p.chunks;
  const size_t scratch = size_t(p.padded_rows) * TILE;
  std::vector<float> a, b, c, d, e;
  p.turned = aligned(a, all * p.dim), p.by_mean = aligned(b, all);
  p.sums = aligned(c, parts * p.dim_v), p.states = aligned(d, parts * 3);
  float* scratches = aligned(e, scratch * threads->threads());
  const Level& now = level();
  {
    const WithoutGil free;
    for (int head = 0; head < heads; head++) now.prepare(p, head);
    // Heads of one chunk lie beside each other, for they share its angles.
    threads->run(heads * p.chunks, [&](int i, int thread) { now.attend(p, i % heads, i / heads, scratches + scratch * thread); });
    for (int head = 0; head < heads; head++) now.finish(p, head);
  }
  return {out_array, lse_array};
}

Out3 decode(const Stored& stored, int from, int count) {
  stored.check_complete(), stored.check_span("rows", from, count);
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
      .def("rotation", &Stored::rotation);
  m.def("attend", &attend, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("k_from"), nb::arg("v_from"), nb::arg("count"), nb::arg("first"),
        nb::arg("stop"), nb::arg("angles").none(), nb::arg("rope_first"));
  m.def("decode", &decode);
}

}  // namespace kvtool
