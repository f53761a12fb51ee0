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
using Out8 = nb::ndarray<nb::numpy, uint8_t, nb::ndim<3>>;
template <int N>
using Out16 = nb::ndarray<nb::numpy, uint16_t, nb::ndim<N>>;

template <class T, class Array>
Array made(T*& data, std::initializer_list<size_t> sizes) {
  size_t size = 1;
  for (size_t s : sizes) size *= s;
  data = new T[std::max<size_t>(size, 1)];
  return Array(data, sizes, nb::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); }));
}

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

// Chunks of neighbouring tokens of all heads; true where every one of them is.
template <class Item>
bool in_chunks(const Input& in, int chunk, const Item& item) {
  const std::shared_ptr<Pool> threads = the_pool();
  const int chunks = (in.count + chunk - 1) / chunk;
  std::atomic<bool> fine{true};
  const WithoutGil free;
  threads->run(in.heads * chunks, [&](int i, int) {
    const int head = i / chunks, start = i % chunks * chunk;
    if (!item(head, start, std::min(chunk, in.count - start))) fine = false;
  });
  return fine;
}

using Parts = std::pair<std::vector<Out8>, Out16<2>>;

std::optional<Parts> encode_rotated(
    const Floats& x,
    bool bfloat,
    const std::vector<std::pair<Table, Table>>& stages,
    bool ties_up,
    int kind,
    const std::optional<Words<2>>& mean,
    const F32<1>& signs,
    const F32<2>& hartley,
    const Table& steps) {
  RotatedCoding c{};
  c.input = input(x, bfloat), c.ties_up = ties_up, c.kind = Scale(kind);
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
  std::vector<Table> tables(stages.size());
  std::vector<Out8> codes;
  for (size_t i = 0; i < stages.size(); i++) {
    const auto& [boundaries, words] = stages[i];
    int bits = 1;
    while (bits < 8 && size_t(1) << bits < words.size()) bits++;
    if (words.size() != size_t(1) << bits || boundaries.size() + 1 != words.size())
      refuse("stages", "2^b codewords with a boundary between neighbours", std::to_string(words.size()) + " and " + std::to_string(boundaries.size()));
    tables[i].resize(256);
    for (size_t j = 0; j < 256; j++) tables[i][j] = words[j % words.size()];
    c.stage[i].bits = bits, c.stage[i].boundaries = boundaries.data(), c.stage[i].codewords = tables[i].data();
    codes.push_back(made<uint8_t, Out8>(c.stage[i].codes, {size_t(c.input.heads), size_t(c.input.count), size_t(dim * bits + 7) / 8}));
  }
  Out16<2> scale = made<uint16_t, Out16<2>>(c.scale, {size_t(c.input.heads), size_t(c.input.count)});
  const Encoder& now = *level().encoder;
  if (!in_chunks(c.input, CHUNK, [&](int head, int from, int count) { return now.rotated(c, head, from, count); })) return std::nullopt;
  return Parts{codes, scale};
}

using Sides = std::tuple<Out8, Out16<3>, Out16<3>>;

std::optional<Sides> encode_affine(const Floats& x, bool bfloat, int bits, int group, bool by_token) {
  AffineCoding c{};
  c.input = input(x, bfloat), c.bits = bits, c.group = group, c.by_token = by_token;
  if (bits < 1 || bits > 8) refuse("bits", "1 to 8", std::to_string(bits));
  if (group < 1) refuse("group", "at least 1", std::to_string(group));
  const size_t heads = c.input.heads, count = c.input.count, dim = c.input.dim;
  auto groups = [&](size_t size) { return (size + group - 1) / group; };
  Out8 codes = made<uint8_t, Out8>(c.codes, {heads, count, (dim * bits + 7) / 8});
  auto side = [&](uint16_t*& data) {
    return by_token ? made<uint16_t, Out16<3>>(data, {heads, count, groups(dim)}) : made<uint16_t, Out16<3>>(data, {heads, groups(count), dim});
  };
  Out16<3> step = side(c.step), zero = side(c.zero);
  const int chunk = by_token ? CHUNK : (CHUNK + group - 1) / group * group;
  const Encoder& now = *level().encoder;
  if (!in_chunks(c.input, chunk, [&](int head, int from, int count) { return now.affine(c, head, from, count); })) return std::nullopt;
  return Sides{codes, step, zero};
}

nb::ndarray<nb::numpy, double, nb::ndim<2>> sum_over_tokens(const Floats& x, bool bfloat) {
  const Input in = input(x, bfloat);
  double* out;
  auto array = made<double, nb::ndarray<nb::numpy, double, nb::ndim<2>>>(out, {size_t(in.heads), size_t(in.dim)});
  const int chunks = (in.count + SUM_CHUNK - 1) / SUM_CHUNK;
  std::vector<double> parts(size_t(in.heads) * chunks * in.dim);
  const Encoder& now = *level().encoder;
  in_chunks(in, SUM_CHUNK, [&](int head, int from, int count) {
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
        nb::arg("mean").none(), nb::arg("signs"), nb::arg("hartley"), nb::arg("steps"));
  m.def("encode_affine", &encode_affine);
  m.def("sum_over_tokens", &sum_over_tokens);
}

}  // namespace kvtool
