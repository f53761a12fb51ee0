// Streams of codes checked once, and what packs, unpacks, finds and looks up their values. No pointer leaves here unchecked.
#include <stdexcept>

#include "bindings.hpp"
#include "streams.hpp"

namespace kvtool {
namespace {

constexpr int64_t CHUNK = 1 << 16;  // codes that a thread takes at a time, or so

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

template <class Some>
void in_chunks(int64_t count, int64_t together, const Some& some) {
  in_parts(count, CHUNK, together, some);
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
    const Values1& x, bool bfloat, const F32<1>& centroids,
    const std::optional<F32<1>>& signs, double scale, const Flat<uint8_t>& out) {
  const Reals given = reals("x", x, bfloat);
  const int64_t count = int64_t(x.shape(0)), dim = signs ? int64_t(signs->shape(0)) : 0, words = int64_t(centroids.shape(0));
  if (words < 1 || words > MAX_CENTROIDS) refuse("centroids", "1 to " + std::to_string(MAX_CENTROIDS), std::to_string(words));
  if (signs && (dim < 1 || dim > MAX_ROTATED || (dim & (dim - 1)) || count % dim))
    refuse("signs", "of rows of 2^k entries, at most " + std::to_string(MAX_ROTATED), std::to_string(dim));
  check("out", out, {count});
  expect_writes(out.data(), out.nbytes());
  const Nearest n{
      given, centroids.data(), int(words), int(dim), signs ? signs->data() : nullptr, float(scale), out.data()};
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

void check_rows(const Values1& x, int64_t rows, int64_t dim) {
  if (dim < 8 || dim > MAX_ROTATED || (dim & (dim - 1))) refuse("rows", "of 2^k entries, 8 to " + std::to_string(MAX_ROTATED), std::to_string(dim));
  check("x", x, {rows * dim});
}

void encode_signs(const Values1& x, bool bfloat, const F32<1>& signs, const Flat<uint8_t>& packed, const Flat<float>& size) {
  const int64_t rows = int64_t(size.shape(0)), dim = int64_t(signs.shape(0));
  check_rows(x, rows, dim), check("packed", packed, {rows * dim / 8});
  const Rotated r{reals("x", x, bfloat), int(dim), signs.data(), packed.data(), size.data()};
  const Streamer& now = streamer();
  in_parts(rows, CHUNK / dim, 1, [&](int64_t from, int64_t to) { now.rotated(r, from, to); });
}

void encode_two_stages(
    const Values1& x, bool bfloat, int left, int dim, int bits, const F32<1>& centroids, const F32<1>& first, const F32<1>& second,
    const Flat<uint8_t>& packed1, const Flat<uint8_t>& packed2) {
  if (bits < 1 || bits > 4) refuse("bits", "1 to 4", std::to_string(bits));
  if (left < int(Type::FLOAT32) || left > int(Type::BFLOAT16)) refuse("left", "0 to 2, of a float", std::to_string(left));
  if (dim < 1 || dim > MAX_ROTATED) refuse("dim", "1 to " + std::to_string(MAX_ROTATED), std::to_string(dim));
  const int64_t rows = int64_t(x.shape(0)) / dim, bytes = packed_bytes(dim, bits, true);
  check("x", x, {rows * dim}), check("packed", packed1, {rows * bytes}), check("packed", packed2, {rows * bytes});
  check("centroids", centroids, {1 << bits}), check("boundaries", first, {(1 << bits) - 1}), check("boundaries", second, {(1 << bits) - 1});
  const TwoStages s{reals("x", x, bfloat), Type(left), dim, bits, centroids.data(), first.data(), second.data(), packed1.data(), packed2.data()};
  const Streamer& now = streamer();
  in_parts(rows, std::max(1, int(CHUNK) / dim), 1, [&](int64_t from, int64_t to) { now.two_stages(s, from, to); });
}

void pack_signs(const F32<1>& x, const Flat<uint8_t>& out) {
  check("x", x, {int64_t(out.shape(0)) * 8});
  const Streamer& now = streamer();
  in_chunks(int64_t(x.shape(0)), 8, [&](int64_t from, int64_t to) { now.pack_signs(x.data() + from, to - from, out.data() + from / 8); });
}

}  // namespace

void bind_streams(nb::module_& m) {
  m.attr("MAX_ROTATED") = MAX_ROTATED;
  m.def("pack_bits", &pack_bits, nb::arg("codes"), nb::arg("bits"), nb::arg("words"), nb::arg("out"));
  m.def("unpack_bits", &unpack_bits, nb::arg("packed"), nb::arg("bits"), nb::arg("words"), nb::arg("out"));
  m.def(
      "nearest_centroids", &nearest_centroids, nb::arg("x"), nb::arg("bfloat"), nb::arg("centroids"), nb::arg("signs").none(), nb::arg("scale"),
      nb::arg("out"));
  m.def("encode_signs", &encode_signs, nb::arg("x"), nb::arg("bfloat"), nb::arg("signs"), nb::arg("packed"), nb::arg("size"));
  m.def(
      "encode_two_stages", &encode_two_stages, nb::arg("x"), nb::arg("bfloat"), nb::arg("left"), nb::arg("dim"), nb::arg("bits"), nb::arg("centroids"),
      nb::arg("first"), nb::arg("second"), nb::arg("packed1"), nb::arg("packed2"));
  m.def("pack_signs", &pack_signs, nb::arg("x"), nb::arg("out"));
  m.def("look_up", &look_up, nb::arg("codes"), nb::arg("table"), nb::arg("out"));
}

}  // namespace kvtool
