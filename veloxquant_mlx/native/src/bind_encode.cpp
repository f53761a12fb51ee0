// Arrays of floats checked once, and their encoding. No pointer leaves here unchecked.
#include <atomic>
#include <mutex>

#include "bindings.hpp"
#include "coding.hpp"

namespace kvtool {
namespace {

constexpr int CHUNK = 512;        // tokens that a thread takes at a time
constexpr int SUM_CHUNK = 4096;   // of a sum: partial sums are added in order, whatever the number of threads
using Table = std::vector<float>;
using Out8 = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
template <int N>
using Out16 = nb::ndarray<uint16_t, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// Memory of a result that is to be written whole.
template <class Array>
auto written(const char* name, const Array& array, std::vector<int64_t> wanted) {
  check(name, array, std::move(wanted));
  expect_writes(array.data(), array.nbytes());
  return array.data();
}

// A rotary embedding to undo: tables of angles, the first rotated entry, whether they are interleaved, the ratio of magnitudes.
using Undo = std::tuple<Tables, int, bool, float>;

Input input(const Floats& x, bool bfloat) {
  const auto type = x.dtype();
  const bool word = type == nb::dtype<uint16_t>(), real = type == nb::dtype<float>();
  const bool half = type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16;
  if (!(bfloat ? word : real || half) || (x.shape(2) > 1 && x.stride(2) != 1))
    refuse("x", bfloat ? "uint16 of bfloat16, D contiguous" : "float16 or float32, D contiguous", std::to_string(type.bits) + " bits");
  if (x.shape(2) < 1 || x.shape(2) > size_t(MAX_DIM)) refuse("x", "(H, S, D) with D at most " + std::to_string(MAX_DIM), shape(x));
  if (x.shape(1) > size_t(INT32_MAX) - SUM_CHUNK) refuse("x", "of less than 2^31 tokens", shape(x));
  const int64_t size = type.bits / 8;
  return {bfloat ? Type::BFLOAT16 : real ? Type::FLOAT32 : Type::FLOAT16,
          int(x.shape(0)), int(x.shape(1)), int(x.shape(2)),
          static_cast<const uint8_t*>(x.data()), x.stride(0) * size, x.stride(1) * size};
}

// The tables live as long as this does.
class Undoing {
 public:
  Undoing(const std::optional<Undo>& undo, Input& in)
      : tables_(undo ? std::optional<Tables>(std::get<0>(*undo)) : std::nullopt, in.count, undo ? std::get<1>(*undo) : 0, in.dim) {
    if (!undo) return;
    in.undo = tables_.view;
    std::tie(std::ignore, in.rope_first, in.interleaved, in.ratio) = *undo;
  }

 private:
  AngleTables tables_;
};

// Chunks of neighbouring tokens of all heads, the heads of one chunk beside each other, for they share its angles.
// What they lost, or nothing where one of them is not fine.
template <class Item>
std::optional<Loss> in_chunks(const Input& in, int chunk, const Item& item) {
  const std::shared_ptr<Pool> threads = the_pool();
  const int chunks = (in.count + chunk - 1) / chunk;
  std::atomic<bool> fine{true};
  std::vector<Loss> losses(size_t(in.heads) * chunks);
  {
    const WithoutGil free;
    threads->run(in.heads * chunks, [&](int i, int) {
      const int head = i % in.heads, start = i / in.heads * chunk;
      if (!item(head, start, std::min(chunk, in.count - start), losses[i])) fine = false;
    });
  }
  if (!fine) return std::nullopt;
  Loss total{};
  for (const Loss& one : losses) total.error += one.error, total.energy += one.energy;
  return total;
}

using Lost = std::optional<std::pair<double, double>>;

Lost lost(const std::optional<Loss>& loss) { return loss ? Lost({loss->error, loss->energy}) : std::nullopt; }

Lost encode_rotated(
    const Floats& x,
    bool bfloat,
    const std::vector<std::pair<Table, Table>>& stages,
    bool ties_up,
    int kind,
    const std::optional<Words<2>>& mean,
    const F32<1>& signs,
    const F32<2>& hartley,
    const Table& steps,
    const std::optional<Undo>& undo,
    const std::vector<Out8>& codes,
    const Out16<2>& scale) {
  RotatedCoding c{};
  c.input = input(x, bfloat);
  const Undoing undoing(undo, c.input);
  c.ties_up = ties_up, c.kind = Scale(kind);
  const int dim = c.input.dim;
  if (stages.empty() || stages.size() > 2) refuse("stages", "1 or 2", std::to_string(stages.size()));
  if (kind < 0 || kind > 2) refuse("kind", "0, 1 or 2", std::to_string(kind));
  if (mean) check("mean", *mean, {c.input.heads, dim}), c.mean = mean->data();
  check("signs", signs, {dim});
  c.odd = int(hartley.shape(0)), check("hartley", hartley, {c.odd, c.odd});
  const int power = c.odd ? dim / c.odd : 0;
  if (c.odd < 1 || c.odd * power != dim || (power & (power - 1))) refuse("hartley", "(m, m) with D = m 2^k", shape(hartley));
  c.signs = signs.data(), c.hartley = hartley.data(), c.stages = int(stages.size());
  if (!steps.empty()) {
    if (stages.size() != 1) refuse("steps", "of one stage", std::to_string(stages.size()));
    c.steps = steps.data(), c.candidates = int(steps.size());
  }
  std::vector<Table> tables(stages.size()), bounds(stages.size());
  if (codes.size() != stages.size()) refuse("codes", "of each stage", std::to_string(codes.size()));
  for (size_t i = 0; i < stages.size(); i++) {
    const auto& [boundaries, words] = stages[i];
    int bits = 1;
    while (bits < 8 && size_t(1) << bits < words.size()) bits++;
    if (words.size() != size_t(1) << bits || boundaries.size() + 1 != words.size())
      refuse("stages", "2^b codewords with a boundary between neighbours", std::to_string(words.size()) + " and " + std::to_string(boundaries.size()));
    tables[i].resize(256);
    for (size_t j = 0; j < 256; j++) tables[i][j] = words[j % words.size()];
    bounds[i] = boundaries, bounds[i].resize(std::max<size_t>(16, words.size()));  // a vector of them is read
    c.stage[i].bits = bits, c.stage[i].boundaries = bounds[i].data(), c.stage[i].codewords = tables[i].data();
    c.stage[i].codes = written("codes", codes[i], {c.input.heads, c.input.count, (dim * bits + 7) / 8});
  }
  c.scale = written("scale", scale, {c.input.heads, c.input.count});
  const Encoder& now = *level().encoder;
  return lost(in_chunks(c.input, CHUNK, [&](int head, int from, int count, Loss& l) { return now.rotated(c, head, from, count, l); }));
}

Lost encode_affine(
    const Floats& x,
    bool bfloat,
    int bits,
    int group,
    bool by_token,
    const std::optional<Undo>& undo,
    const Out8& codes,
    const Out16<3>& step,
    const Out16<3>& zero) {
  AffineCoding c{};
  c.input = input(x, bfloat);
  const Undoing undoing(undo, c.input);
  c.bits = bits, c.group = group, c.by_token = by_token;
  if (bits < 1 || bits > 8) refuse("bits", "1 to 8", std::to_string(bits));
  if (group < 1) refuse("group", "at least 1", std::to_string(group));
  const int64_t heads = c.input.heads, count = c.input.count, dim = c.input.dim;
  auto groups = [&](int64_t size) { return (size + group - 1) / group; };
  const std::vector<int64_t> sides = by_token ? std::vector<int64_t>{heads, count, groups(dim)} : std::vector<int64_t>{heads, groups(count), dim};
  c.codes = written("codes", codes, {heads, count, (dim * bits + 7) / 8});
  c.step = written("step", step, sides), c.zero = written("zero", zero, sides);
  const int chunk = by_token ? CHUNK : (CHUNK + group - 1) / group * group;
  const Encoder& now = *level().encoder;
  return lost(in_chunks(c.input, chunk, [&](int head, int from, int count, Loss& l) { return now.affine(c, head, from, count, l); }));
}

bool encode_signs(
    const Floats& x,
    bool bfloat,
    const F32<3>& turns,
    const F32<2>& hartley,
    const std::optional<Words<2>>& mean,
    const Out8& codes,
    const Out16<2>& norm) {
  SignCoding c{};
  c.input = input(x, bfloat);
  const int dim = c.input.dim;
  c.blocks = int(turns.shape(0)), c.odd = int(hartley.shape(0));
  if (c.blocks < 1 || c.blocks > MAX_BLOCKS) refuse("turns", "of 1 to 4 blocks", std::to_string(c.blocks));
  check("turns", turns, {c.blocks, 2, dim}), check("hartley", hartley, {c.odd, c.odd});
  const int power = c.odd ? dim / c.odd : 0;
  if (c.odd < 1 || c.odd * power != dim || (power & (power - 1))) refuse("hartley", "(m, m) with D = m 2^k", shape(hartley));
  if (mean) check("mean", *mean, {c.input.heads, dim}), c.mean = mean->data();
  c.turns = turns.data(), c.hartley = hartley.data();
  c.codes = written("codes", codes, {c.input.heads, c.input.count, (c.blocks * dim + 7) / 8});
  c.norm = written("norm", norm, {c.input.heads, c.input.count});
  const Encoder& now = *level().encoder;
  return in_chunks(c.input, CHUNK, [&](int head, int from, int count, Loss&) { return now.signs(c, head, from, count); }).has_value();
}

nb::ndarray<nb::numpy, double, nb::ndim<2>> sum_over_tokens(const Floats& x, bool bfloat, const std::optional<Undo>& undo) {
  Input in = input(x, bfloat);
  const Undoing undoing(undo, in);
  double* out = new double[std::max(in.heads * in.dim, 1)];
  const nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<double*>(p); });
  const nb::ndarray<nb::numpy, double, nb::ndim<2>> array(out, {size_t(in.heads), size_t(in.dim)}, owner);
  const int chunks = (in.count + SUM_CHUNK - 1) / SUM_CHUNK;
  std::vector<double> parts(size_t(in.heads) * chunks * in.dim);
  const Encoder& now = *level().encoder;
  in_chunks(in, SUM_CHUNK, [&](int head, int from, int count, Loss&) {
    now.sum(in, head, from, count, parts.data() + (size_t(head) * chunks + from / SUM_CHUNK) * in.dim);
    return true;
  });
  for (int head = 0; head < in.heads; head++)
    for (int i = 0; i < in.dim; i++) {
      double total = 0;
      for (int c = 0; c < chunks; c++) total += parts[(size_t(head) * chunks + c) * in.dim + i];
      out[size_t(head) * in.dim + i] = total;
    }
  return array;
}

}  // namespace

void bind_encode(nb::module_& m) {
  m.def("encode_rotated", &encode_rotated, nb::arg("x"), nb::arg("bfloat"), nb::arg("stages"), nb::arg("ties_up"), nb::arg("kind"),
        nb::arg("mean").none(), nb::arg("signs"), nb::arg("hartley"), nb::arg("steps"), nb::arg("undo").none(), nb::arg("codes"),
        nb::arg("scale"));
  m.def("encode_affine", &encode_affine, nb::arg("x"), nb::arg("bfloat"), nb::arg("bits"), nb::arg("group"), nb::arg("by_token"),
        nb::arg("undo").none(), nb::arg("codes"), nb::arg("step"), nb::arg("zero"));
  m.def("encode_signs", &encode_signs, nb::arg("x"), nb::arg("bfloat"), nb::arg("turns"), nb::arg("hartley"), nb::arg("mean").none(),
        nb::arg("codes"), nb::arg("norm"));
  m.def("sum_over_tokens", &sum_over_tokens, nb::arg("x"), nb::arg("bfloat"), nb::arg("undo").none());
}

}  // namespace kvtool
