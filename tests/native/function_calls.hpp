// Calls of streams, of the kernel API and of the search for codewords: each reads from a file what its function is given.
#pragma once
#include "calls.hpp"

namespace kvtool {
namespace {

// --- streams

void pack(const Functions& at, File& in) {
  const int bits = int(in.number());
  const bool words = in.number();
  int64_t count;
  const uint8_t* codes = in.array<uint8_t>(&count);
  at.streamer->pack(codes, count, bits, words, in.result<uint8_t>());
}

void unpack(const Functions& at, File& in) {
  const int bits = int(in.number());
  const bool words = in.number();
  const int64_t count = in.number();
  const uint8_t* packed = in.array<uint8_t>();
  at.streamer->unpack(packed, count, bits, words, in.result<uint8_t>());
}

void nearest_centroids(const Functions& at, File& in) {
  Nearest n{};
  n.x = reals_of(in);
  const int64_t count = in.number();
  n.centroids = in.array<float>(), n.count = int(in.number()), n.dim = int(in.number()), n.signs = in.array<float>(), n.scale = in.real();
  n.codes = in.result<uint8_t>();
  in_parts(in, count, [&](int64_t from, int64_t to) { at.streamer->nearest(n, from, to); });
}

void look_up(const Functions& at, File& in) {
  int64_t count;
  const uint8_t* codes = in.array<uint8_t>(&count);
  const uint16_t* table = in.array<uint16_t>();
  at.streamer->look_up(codes, count, table, in.result<uint16_t>());
}

void rotated_signs(const Functions& at, File& in) {
  Rotated r{};
  r.x = reals_of(in);
  const int64_t rows = in.number();
  r.dim = int(in.number()), r.signs = in.array<float>(), r.packed = in.result<uint8_t>(), r.size = in.result<float>();
  in_parts(in, rows, [&](int64_t from, int64_t to) { at.streamer->rotated(r, from, to); });
}

void two_stages(const Functions& at, File& in) {
  TwoStages s{};
  s.x = reals_of(in);
  const int64_t rows = in.number();
  s.left = Type(in.number()), s.dim = int(in.number()), s.bits = int(in.number());
  s.centroids = in.array<float>(), s.first = in.array<float>(), s.second = in.array<float>();
  s.packed1 = in.result<uint8_t>(), s.packed2 = in.result<uint8_t>();
  in_parts(in, rows, [&](int64_t from, int64_t to) { at.streamer->two_stages(s, from, to); });
}

void pack_signs(const Functions& at, File& in) {
  int64_t bytes;
  const float* x = in.array<float>(&bytes);
  at.streamer->pack_signs(x, bytes / 4, in.result<uint8_t>());
}

// --- functions of the kernel API

void hamming(const Functions& at, File& in) {
  Hamming h{};
  const int64_t rows = in.number();
  h.width = int(in.number()), h.query = in.array<uint8_t>(), h.bits = in.array<uint8_t>(), h.offsets = in.array<float>(),
      h.scale = in.real();
  h.out = in.result<float>();
  in_parts(in, rows, [&](int64_t from, int64_t to) { at.kernels->hamming(h, from, to); });
}

void sign_scores(const Functions& at, File& in) {
  SignScores s{};
  s.slots = in.number(), s.heads = int(in.number()), s.width = int(in.number());
  s.q = in.array<float>(), s.packed = in.array<uint8_t>(), s.norms = in.array<float>(), s.factor = in.real(), s.out = in.result<float>();
  of_heads(in, s.heads, int(s.slots), [&](int head, int from, int count) { at.kernels->sign_scores(s, head, from, from + count); });
}

void project(const Functions& at, File& in) {
  Projected p{};
  p.x = reals_of(in);
  const int64_t groups = in.number();
  p.rows = in.number(), p.dim = int(in.number()), p.sign = int(in.number()), p.filters = in.array<float>(), p.out = in.result<float>();
  in_parts(in, groups * p.rows, [&](int64_t from, int64_t to) { at.kernels->project(p, from, to); });
}

void round_trip(const Functions& at, File& in) {
  RoundTrip r{};
  r.x = reals_of(in);
  const int64_t outer = in.number();
  r.length = in.number(), r.inner = in.number(), r.group = in.number(), r.levels = in.real(), r.eps = in.real(),
      r.out = in.result<uint8_t>();
  const int64_t groups = outer * ((r.length + r.group - 1) / r.group);
  in_parts(in, groups, [&](int64_t from, int64_t to) { at.kernels->round_trip(r, from, to); });
}

void gather(const Functions& at, File& in) {
  Gather g{};
  g.size = int(in.number());
  int64_t bytes;
  g.indices = in.array<uint8_t>(&bytes), g.table = in.array<uint8_t>(), g.count = in.number(), g.width = in.number(),
      g.out = in.result<uint8_t>();
  in_parts(in, bytes / g.size, [&](int64_t from, int64_t to) { at.kernels->gather(g, from, to); });
}

void drop_row(const Functions& at, File& in) {
  DropRow d{};
  const int64_t groups = in.number();
  d.rows = in.number(), d.width = in.number(), d.x = in.array<uint8_t>(), d.gone = in.array<int32_t>(), d.out = in.result<uint8_t>();
  in_parts(in, groups * (d.rows - 1), [&](int64_t from, int64_t to) { at.kernels->drop_row(d, from, to); });
}

void turn_back(const Functions& at, File& in) {
  TurnBack t{};
  t.x = reals_of(in);
  const int64_t groups = in.number();
  t.rows = in.number(), t.dim = int(in.number()), t.gone = in.array<int32_t>(), t.positions = in.array<int32_t>(),
      t.turn = in.array<float>();
  t.out = in.result<uint8_t>();
  in_parts(in, groups * (t.rows - 1), [&](int64_t from, int64_t to) { at.kernels->turn_back(t, from, to); });
}

// --- search

template <class T, class Codes>
Search<T> search_of(File& in, Codes* Search<T>::*codes) {
  Search<T> s{};
  s.count = in.number(), s.columns = int(in.number()), s.size = int(in.number()), s.points = in.array<T>(), s.words = in.array<T>();
  s.first = in.array<int32_t>(), s.number = in.array<int32_t>(), s.half = in.array<T>(), s.largest = in.array<T>();
  s.*codes = in.result<Codes>();
  return s;
}

void nearest(const Functions& at, File& in) {
  const int64_t groups = in.number();
  const auto s = search_of<float>(in, &Search<float>::codes);
  of_heads(in, int(groups), int(s.count), [&](int g, int from, int count) { at.searcher->nearest(s, g, from, from + count); });
}

void nearest_double(const Functions& at, File& in) {
  const int64_t groups = in.number();
  const auto s = search_of<double>(in, &Search<double>::nearest);
  of_heads(in, int(groups), int(s.count), [&](int g, int from, int count) { at.searcher->nearest_double(s, g, from, from + count); });
}

void accumulate(const Functions& at, File& in) {
  const int64_t groups = in.number();
  Moments m{};
  m.count = in.number(), m.number = int(in.number()), m.size = int(in.number());
  m.points = in.array<double>(), m.words = in.array<double>(), m.nearest = in.array<int32_t>();
  m.sums = in.result<double>(), m.counts = in.result<int64_t>(), m.distances = in.result<double>();
  for (int64_t g = 0; g < groups; g++) at.searcher->accumulate(m, int(g));
}

void code_runs(const Functions& at, File& in) {
  RunCoding c{};
  c.x = rows_of(in);
  c.unit = in.real(), c.divisor = in.array<float>(), c.order = in.array<int32_t>(), c.size = int(in.number()), c.runs = int(in.number());
  c.number = int(in.number()), c.bits = int(in.number()), c.words = in.array<float>(), c.first = in.array<int32_t>();
  c.half = in.array<float>(), c.largest = in.array<float>(), c.bytes = in.number(), c.codes = in.result<uint8_t>();
  of_heads(in, c.x.heads, c.x.count, [&](int head, int from, int count) { at.searcher->runs(c, head, from, count); });
}

void code_planes(const Functions& at, File& in) {
  PlaneCoding c{};
  c.x = rows_of(in);
  c.mean = in.array<float>(), c.planes = in.array<int32_t>(), c.turn = in.array<float>(), c.words = in.array<float>();
  c.bits = in.array<uint8_t>(), c.place = in.array<int32_t>(), c.kept = in.array<int32_t>(), c.bytes = in.number(),
      c.codes = in.result<uint8_t>();
  of_heads(in, c.x.heads, c.x.count, [&](int head, int from, int count) { at.searcher->planes(c, head, from, count); });
}

void farness(const Functions& at, File& in) {
  Farness f{};
  f.x = rows_of(in), f.middle = in.array<float>(), f.inverse = in.array<float>(), f.out = in.result<float>();
  of_heads(in, f.x.heads, f.x.count, [&](int head, int from, int count) { at.searcher->farness(f, head, from, count); });
}

}  // namespace
}  // namespace kvtool
