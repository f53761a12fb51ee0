// What Python sees: stored rows checked once, and attention to them. No pointer leaves here unchecked.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pool.hpp"
#include "problem.hpp"

namespace nb = nanobind;

namespace kvtool {
namespace {

constexpr int CHUNK = 512;  // tokens that a thread takes at a time: enough that merging their sums is nothing beside making them

using Bytes = nb::ndarray<const uint8_t, nb::ndim<3>, nb::device::cpu>;
using Floats = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
template <int N>
using Words = nb::ndarray<const uint16_t, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <int N>
using F32 = nb::ndarray<const float, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Bounds = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& name, const std::string& must, const std::string& got) {
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

std::vector<const Level*> levels() {
  std::vector<const Level*> found;
#ifdef KVTOOL_X86
  __builtin_cpu_init();
  const bool two = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512dq");
  if (two && wide) found.push_back(&avx512);
  if (two) found.push_back(&avx2);
#endif
  found.push_back(&baseline);
  return found;
}

const Level* level = levels().front();
int wanted_threads = 1;
std::mutex pool_made;
pid_t pool_owner = 0;
// Never destroyed: at exit its threads just end, and a forked child has none of them to join.
std::shared_ptr<Pool>& pool = *new std::shared_ptr<Pool>;

void forget_parents_pool() {
  if (pool && pool_owner != getpid()) new std::shared_ptr<Pool>(std::move(pool));
}

std::shared_ptr<Pool> the_pool() {
  std::lock_guard<std::mutex> lock(pool_made);
  forget_parents_pool();
  if (!pool) pool = std::make_shared<Pool>(wanted_threads), pool_owner = getpid();
  return pool;
}

void set_level(const std::string& name) {
  std::string known;
  for (const Level* one : levels()) {
    if (name == one->name) {
      level = one;
      return;
    }
    known += (known.empty() ? "" : ", ") + std::string(one->name);
  }
  refuse("KVTOOL_SIMD", "one of " + known, name);
}

void set_threads(int threads) {
  if (threads < 1 || threads > 1024) refuse("KVTOOL_THREADS", "1 to 1024", std::to_string(threads));
  std::lock_guard<std::mutex> lock(pool_made);
  wanted_threads = threads;
  forget_parents_pool();
  pool.reset();
}

using Out3 = nb::ndarray<nb::numpy, float, nb::ndim<3>>;
using Out2 = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

float* aligned(std::vector<float>& memory, size_t size) {
  memory.resize(size + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

template <class Array>
Array owned(float* data, std::initializer_list<size_t> sizes) {
  return Array(data, sizes, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<float*>(p); }));
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
  p.chunk = CHUNK, p.chunks = std::max(1, (count + CHUNK - 1) / CHUNK);

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
  const Level& now = *level;
  {
    nb::gil_scoped_release release;
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
  const Level& now = *level;
  const std::shared_ptr<Pool> threads = the_pool();
  const int chunk = CHUNK, chunks = (count + chunk - 1) / chunk;
  nb::gil_scoped_release release;
  threads->run(rows.heads * chunks, [&](int i, int) {
    const int head = i / chunks, start = i % chunks * chunk;
    now.decode(rows, head, from + start, std::min(chunk, count - start), out + (int64_t(head) * count + start) * rows.dim);
  });
  return array;
}

}  // namespace
}  // namespace kvtool

NB_MODULE(_native, m) {
  using namespace kvtool;
  m.attr("MAX_DIM") = MAX_DIM;
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
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const Level* one : levels()) names.emplace_back(one->name);
    return names;
  });
  m.def("level", [] { return std::string(level->name); });
  m.def("set_level", &set_level);
  m.def("set_threads", &set_threads);
  m.def("threads", [] { return the_pool()->threads(); });
}
