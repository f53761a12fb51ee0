// Streams of codes checked once, and what packs, unpacks, finds and looks up their values. No pointer leaves here unchecked.
#include <stdexcept>

#include "bindings.hpp"
#include "streams.hpp"

namespace kvtool {
namespace {

constexpr int64_t CHUNK = 1 << 16;  // codes that a thread takes at a time, or so

template <class T>
using Flat = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const Streamer& streamer() {
  const Level* now = &level();
#ifdef KVTOOL_X86
  if (now == &avx512) return avx512_streamer;
  if (now == &avx2) return avx2_streamer;
#endif
#ifdef KVTOOL_ARM64
  if (now == &neon) return neon_streamer;
#endif
  return now == &baseline ? baseline_streamer : throw std::logic_error("a level without streams");
}

int64_t packed_bytes(int64_t count, int bits, bool words) {
  return words ? (count + 32 / bits - 1) / (32 / bits) * 4 : (count * bits + 7) / 8;
}

void check_stream(int64_t codes, int64_t packed, int bits, bool words) {
  if (bits < 1 || bits > 8) refuse("bits", "1 to 8", std::to_string(bits));
  const int64_t wanted = packed_bytes(codes, bits, words);
  if (packed != wanted) refuse("packed", std::to_string(wanted) + " bytes", std::to_string(packed));
}

// Calls some(from, to) for parts of `count`, each a multiple of `together` but for the last.
template <class Some>
void in_chunks(int64_t count, int64_t together, const Some& some) {
  const int64_t least = std::max<int64_t>(1, CHUNK / together) * together;
  const int64_t each = std::max(least, (count / INT32_MAX + 1) / together * together);
  const std::shared_ptr<Pool> threads = the_pool();
  const WithoutGil free;
  threads->run(int((count + each - 1) / each), [&](int i, int) { some(i * each, std::min(i * each + each, count)); });
}

void pack_bits(const Flat<const uint8_t>& codes, int bits, bool words, const Flat<uint8_t>& out) {
  const int64_t count = int64_t(codes.shape(0));
  check_stream(count, int64_t(out.shape(0)), bits, words);
  expect_writes(out.data(), out.nbytes());
  const Streamer& now = streamer();
  in_chunks(count, words ? 32 / bits : 8, [&](int64_t from, int64_t to) {
    now.pack(codes.data() + from, to - from, bits, words, out.data() + packed_bytes(from, bits, words));
  });
}

void unpack_bits(const Flat<const uint8_t>& packed, int bits, bool words, const Flat<uint8_t>& out) {
  const int64_t count = int64_t(out.shape(0));
  check_stream(count, int64_t(packed.shape(0)), bits, words);
  expect_writes(out.data(), out.nbytes());
  const Streamer& now = streamer();
  in_chunks(count, words ? 32 / bits : 8, [&](int64_t from, int64_t to) {
    now.unpack(packed.data() + packed_bytes(from, bits, words), to - from, bits, words, out.data() + from);
  });
}

void nearest_centroids(
    const nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>& x, bool bfloat, const F32<1>& centroids,
    const std::optional<F32<1>>& signs, double scale, const Flat<uint8_t>& out) {
  const auto type = x.dtype();
  const bool word = type == nb::dtype<uint16_t>(), real = type == nb::dtype<float>();
  const bool half = type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16;
  if (!(bfloat ? word : real || half)) refuse("x", bfloat ? "uint16 of bfloat16" : "float16 or float32", std::to_string(type.bits) + " bits");
  const int64_t count = int64_t(x.shape(0)), dim = signs ? int64_t(signs->shape(0)) : 0, words = int64_t(centroids.shape(0));
  if (words < 1 || words > MAX_CENTROIDS) refuse("centroids", "1 to " + std::to_string(MAX_CENTROIDS), std::to_string(words));
  if (signs && (dim < 1 || dim > MAX_ROTATED || (dim & (dim - 1)) || count % dim))
    refuse("signs", "of rows of 2^k entries, at most " + std::to_string(MAX_ROTATED), std::to_string(dim));
  check("out", out, {count});
  expect_writes(out.data(), out.nbytes());
  const Nearest n{
      bfloat ? Type::BFLOAT16 : real ? Type::FLOAT32 : Type::FLOAT16, static_cast<const uint8_t*>(x.data()), centroids.data(), int(words),
      int(dim), signs ? signs->data() : nullptr, float(scale), out.data()};
  const Streamer& now = streamer();
  in_chunks(count, dim ? dim : 64, [&](int64_t from, int64_t to) { now.nearest(n, from, to); });
}

void look_up(const Flat<const uint8_t>& codes, const Words<1>& table, const Flat<uint16_t>& out) {
  const int64_t count = int64_t(codes.shape(0));
  check("table", table, {MAX_CENTROIDS}), check("out", out, {count});
  expect_writes(out.data(), out.nbytes());
  const Streamer& now = streamer();
  in_chunks(count, 64, [&](int64_t from, int64_t to) { now.look_up(codes.data() + from, to - from, table.data(), out.data() + from); });
}

}  // namespace

void bind_streams(nb::module_& m) {
  m.attr("MAX_ROTATED") = MAX_ROTATED;
  m.def("pack_bits", &pack_bits, nb::arg("codes"), nb::arg("bits"), nb::arg("words"), nb::arg("out"));
  m.def("unpack_bits", &unpack_bits, nb::arg("packed"), nb::arg("bits"), nb::arg("words"), nb::arg("out"));
  m.def(
      "nearest_centroids", &nearest_centroids, nb::arg("x"), nb::arg("bfloat"), nb::arg("centroids"), nb::arg("signs").none(), nb::arg("scale"),
      nb::arg("out"));
  m.def("look_up", &look_up, nb::arg("codes"), nb::arg("table"), nb::arg("out"));
}

}  // namespace kvtool
