// Single calls of a level's functions, without Python: run_calls LEVEL IN OUT.
//
// IN holds calls: the name of a function, then what it reads here, in that order; OUT what each wrote. Where the extension
// calls a function for a part of its rows at a time, so does this: for those before a number that the file gives, and for the rest.
#include "calibrated.hpp"
#include "coding.hpp"
#include "file.hpp"
#include "kernels.hpp"
#include "search.hpp"
#include "streams.hpp"

// Those of one level, which no level.cpp need be there for.
#define KVTOOL_DECLARED(level)                           \
  extern const Encoder level##_encoder;                  \
  extern const Searcher level##_searcher;                \
  extern const Calibrated level##_calibrated;            \
  namespace in_##level {                                 \
  void decode_as(const Decoding&, int, int, int);        \
  void turn(const Turning&, int, int);                   \
  }
#define KVTOOL_LISTED(level)                                                                                                    \
  {#level, &level##_encoder, &level##_searcher, &level##_calibrated, &level##_streamer, &level##_kernels, in_##level::decode_as, \
   in_##level::turn}

namespace kvtool {
KVTOOL_DECLARED(baseline)
#ifdef KVTOOL_X86
KVTOOL_DECLARED(avx2)
KVTOOL_DECLARED(avx512)
#endif
#ifdef KVTOOL_ARM64
KVTOOL_DECLARED(neon)
#endif
}  // namespace kvtool

using namespace kvtool;

namespace {

struct Functions {
  const char* name;
  const Encoder* encoder;
  const Searcher* searcher;
  const Calibrated* calibrated;
  const Streamer* streamer;
  const Kernels* kernels;
  void (*decode_as)(const Decoding&, int head, int start, int stop);
  void (*turn)(const Turning&, int start, int stop);
};

const Functions LEVELS[] = {
#ifdef KVTOOL_X86
    KVTOOL_LISTED(avx512), KVTOOL_LISTED(avx2),
#endif
#ifdef KVTOOL_ARM64
    KVTOOL_LISTED(neon),
#endif
    KVTOOL_LISTED(baseline),
};

// some(from, to) of both parts of `count`.
template <class Some>
void in_parts(File& in, int64_t count, const Some& some) {
  const int64_t cut = in.number();
  if (cut) some(0, cut);
  some(cut, count);
}

// some(head, from, count) of both parts of every head.
template <class Some>
void of_heads(File& in, int heads, int count, const Some& some) {
  const int cut = int(in.number());
  for (int head = 0; head < heads; head++) {
    if (cut) some(head, 0, cut);
    some(head, cut, count - cut);
  }
}

Reals reals_of(File& in) {
  const Type type = Type(in.number());
  return {type, in.array<uint8_t>()};
}

// Tables of cosines and sines: pages of `each` rows. They last as long as what is given for them.
Angles angles_of(File& in, std::vector<const float*>& pages) {
  const int64_t count = in.number();
  Angles angles{};
  for (int64_t i = 0; i < count; i++) pages.push_back(in.array<float>());
  angles.each = int(in.number()), angles.first = int(in.number()), angles.half = int(in.number());
  angles.pages = count ? pages.data() : nullptr;
  return angles;
}

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

const struct {
  const char* name;
  void (*call)(const Functions&, File&);
} FUNCTIONS[] = {
    {"pack", pack}, {"unpack", unpack}, {"nearest_centroids", nearest_centroids}, {"look_up", look_up}, {"rotated_signs", rotated_signs},
    {"two_stages", two_stages}, {"pack_signs", pack_signs}, {"hamming", hamming}, {"sign_scores", sign_scores}, {"project", project},
    {"round_trip", round_trip}, {"gather", gather}, {"drop_row", drop_row}, {"turn_back", turn_back}, {"nearest", nearest},
    {"nearest_double", nearest_double}, {"accumulate", accumulate}, {"code_runs", code_runs}, {"code_planes", code_planes},
    {"farness", farness}, {"encode_rotated", encode_rotated}, {"encode_affine", encode_affine}, {"encode_signs", encode_signs},
    {"sum_over_tokens", sum_over_tokens}, {"encode_keys", encode_keys}, {"encode_values", encode_values},
    {"decode_values", decode_values}, {"decode_as", decode_as}, {"turn", turn},
};

void call(const Functions& at, File& in) {
  int64_t size;
  const char* name = in.array<char>(&size);
  for (const auto& function : FUNCTIONS)
    if (!strncmp(function.name, name, size) && !function.name[size]) return function.call(at, in);
  fprintf(stderr, "no function %.*s\n", int(size), name), exit(2);
}

}  // namespace

int main(int, char** arguments) {
  for (const Functions& functions : LEVELS) {
    if (strcmp(functions.name, arguments[1])) continue;
    File in(arguments[2]);
    FILE* to = fopen(arguments[3], "wb");
    if (!to) return perror(arguments[3]), 2;
    for (; in.more(); in.finish(to)) call(functions, in);
    return fclose(to) ? 2 : 0;
  }
  fprintf(stderr, "no level %s\n", arguments[1]);
  return 2;
}
