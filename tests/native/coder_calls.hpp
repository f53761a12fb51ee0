// Calls of what codes rows, decodes and turns them: each reads from a file what its function is given.
#pragma once
#include "calls.hpp"

namespace kvtool {
namespace {

// --- encoding

// The rows lie as far apart as the file says, and in no more memory than they must.
Input input_of(File& in, std::vector<const float*>& pages) {
  Input x{};
  x.type = Type(in.number()), x.heads = int(in.number()), x.count = int(in.number()), x.dim = int(in.number());
  x.head = in.number(), x.row = in.number(), x.data = in.array<uint8_t>();
  x.undo = angles_of(in, pages), x.rope_first = int(in.number()), x.interleaved = in.number(), x.ratio = in.real();
  return x;
}

// Whether all of it was fine, and what was lost.
template <class Some>
void losing(File& in, const Input& x, const Some& some) {
  double* losses = in.sums<double>();
  int64_t* fine = in.result<int64_t>();
  *fine = 1;
  of_heads(in, x.heads, x.count, [&](int head, int from, int count) {
    Loss loss{};
    *fine &= some(head, from, count, loss);
    losses[0] += loss.error, losses[1] += loss.energy;
  });
}

void encode_rotated(const Functions& at, File& in) {
  std::vector<const float*> pages;
  RotatedCoding c{};
  c.input = input_of(in, pages), c.stages = int(in.number());
  for (int i = 0; i < c.stages; i++) {
    auto& stage = c.stage[i];
    stage.bits = int(in.number()), stage.boundaries = in.array<float>(), stage.codewords = in.array<float>(),
        stage.codes = in.result<uint8_t>();
  }
  c.ties_up = in.number(), c.kind = Scale(in.number()), c.mean = in.array<uint16_t>(), c.signs = in.array<float>(),
      c.hartley = in.array<float>();
  c.odd = int(in.number()), c.candidates = int(in.number()), c.steps = in.array<float>(), c.scale = in.result<uint16_t>();
  losing(in, c.input, [&](int head, int from, int count, Loss& loss) { return at.encoder->rotated(c, head, from, count, loss); });
}

void encode_affine(const Functions& at, File& in) {
  std::vector<const float*> pages;
  AffineCoding c{};
  c.input = input_of(in, pages), c.bits = int(in.number()), c.group = int(in.number()), c.by_token = in.number();
  c.codes = in.result<uint8_t>(), c.step = in.result<uint16_t>(), c.zero = in.result<uint16_t>();
  losing(in, c.input, [&](int head, int from, int count, Loss& loss) { return at.encoder->affine(c, head, from, count, loss); });
}

void encode_signs(const Functions& at, File& in) {
  std::vector<const float*> pages;
  SignCoding c{};
  c.input = input_of(in, pages), c.blocks = int(in.number()), c.turns = in.array<float>(), c.hartley = in.array<float>(),
      c.odd = int(in.number());
  c.mean = in.array<uint16_t>(), c.codes = in.result<uint8_t>(), c.norm = in.result<uint16_t>();
  losing(in, c.input, [&](int head, int from, int count, Loss&) { return at.encoder->signs(c, head, from, count); });
}

void sum_over_tokens(const Functions& at, File& in) {
  std::vector<const float*> pages;
  const Input x = input_of(in, pages);
  double* out = in.sums<double>();
  of_heads(in, x.heads, x.count, [&](int head, int from, int count) { at.encoder->sum(x, head, from, count, out + head * x.dim); });
}

// --- calibrated codecs

Projection projection_of(File& in) {
  Projection p{};
  p.heads = int(in.number()), p.dim = int(in.number()), p.first = in.array<int32_t>(), p.mean = in.array<float>(),
      p.forward = in.array<float>();
  p.panels = in.array<int32_t>();
  return p;
}

Cells cells_of(File& in) {
  Cells c{};
  c.boundaries = in.array<float>(), c.table = in.array<int32_t>(), c.bits = in.array<uint8_t>(), c.place = in.array<int32_t>();
  c.block = in.number();
  return c;
}

void encode_keys(const Functions& at, File& in) {
  KeyCoding c{};
  c.to = projection_of(in), c.cells = cells_of(in), c.x = rows_of(in), c.codes = in.result<uint8_t>();
  int64_t* fine = in.result<int64_t>();
  *fine = 1;
  of_heads(in, c.to.heads, c.x.count, [&](int head, int from, int count) {
    *fine &= at.calibrated->encode_keys(c, head, from, count, in.scratch(at.calibrated->key_scratch(c.to)));
  });
}

ValueCoding values_of(File& in) {
  ValueCoding c{};
  c.to = projection_of(in), c.mean = in.array<float>(), c.mix = in.array<float>(), c.signs = in.array<float>(),
      c.hartley = in.array<float>();
  c.odd = int(in.number()), c.keys = rows_of(in);
  return c;
}

void encode_values(const Functions& at, File& in) {
  ValueCoding c = values_of(in);
  c.cells = cells_of(in), c.x = rows_of(in), c.points = in.array<float>(), c.point = in.array<int32_t>();
  c.codes = in.result<uint8_t>(), c.sizes = in.result<float>();
  int64_t* fine = in.result<int64_t>();
  *fine = 1;
  in_parts(in, c.x.count, [&](int64_t from, int64_t to) {
    float* scratch = in.scratch(at.calibrated->value_scratch(c.to));
    *fine &= at.calibrated->encode_values(c, int(from), int(to - from), scratch);
  });
}

void decode_values(const Functions& at, File& in) {
  ValueCoding c = values_of(in);
  c.components = components_of(in), c.scales = components_of(in), c.type = Type(in.number()), c.out = in.result<uint8_t>();
  in_parts(in, c.keys.count, [&](int64_t from, int64_t to) {
    at.calibrated->decode_values(c, int(from), int(to - from), in.scratch(at.calibrated->value_scratch(c.to)));
  });
}

// --- rows of a cache

void decode_as(const Functions& at, File& in) {
  std::vector<const float*> pages;
  Decoding d{};
  d.rows = rows_of(in), d.from = int(in.number()), d.count = int(in.number()), d.type = Type(in.number()), d.angles = angles_of(in, pages);
  d.rope_first = int(in.number()), d.interleaved = in.number(), d.out = in.result<uint8_t>();
  of_heads(in, d.rows.heads, d.count, [&](int head, int from, int count) { at.decode_as(d, head, from, from + count); });
}

void turn(const Functions& at, File& in) {
  std::vector<const float*> undone, redone;
  Turning t{};
  t.type = Type(in.number()), t.heads = int(in.number()), t.count = int(in.number()), t.dim = int(in.number());
  t.first = int(in.number()), t.half = int(in.number()), t.paired_in = in.number(), t.paired_out = in.number(), t.ratio = in.real();
  t.x = in.array<uint8_t>(), t.row = t.dim * (t.type == Type::FLOAT32 ? 4 : 2), t.head = t.row * t.count;
  t.undo = angles_of(in, undone), t.redo = angles_of(in, redone);
  for (Phases& p : t.phases) p.hi = in.array<double>(), p.lo = in.array<double>(), p.index = in.array<int32_t>(),
      p.low = in.array<int32_t>();
  t.out = in.result<uint8_t>();
  for (int s = 0; s < t.count; s += TILE) at.turn(t, s, s + TILE < t.count ? s + TILE : t.count);
}

}  // namespace
}  // namespace kvtool
