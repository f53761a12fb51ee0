// Attention and decoding of problems from a file, without Python: run_problems LEVEL IN OUT.
//
// IN holds 64-bit integers and arrays, each after its size in bytes, in the order that `problem` reads them; OUT (H, R, D_v) results,
// (H, R) log-sum-exps, then both sides' decoded rows, float32, problem after problem.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "pool.hpp"
#include "problem.hpp"

using namespace kvtool;

namespace {

const Level* const LEVELS[] = {
#ifdef KVTOOL_X86
    &avx512,
    &avx2,
#endif
#ifdef KVTOOL_ARM64
    &neon,
#endif
    &baseline,
};

class Input {
 public:
  explicit Input(const char* path) : file_(fopen(path, "rb")) {
    if (!file_) perror(path), exit(2);
  }
  ~Input() { fclose(file_); }

  bool more() {
    const int c = fgetc(file_);
    ungetc(c, file_);
    return c != EOF;
  }

  int64_t number() {
    int64_t value;
    read(&value, sizeof value);
    return value;
  }

  // Memory of just this size, so that a sanitizer sees any read beyond it; nullptr for an empty array.
  template <class T>
  const T* array(int64_t* bytes = nullptr) {
    const int64_t size = number();
    if (bytes) *bytes = size;
    if (!size) return nullptr;
    arrays_.push_back(Memory(malloc(size)));
    read(arrays_.back().get(), size);
    return static_cast<const T*>(arrays_.back().get());
  }

 private:
  struct Free {
    void operator()(void* p) const { free(p); }
  };
  using Memory = std::unique_ptr<void, Free>;

  void read(void* to, size_t size) {
    if (fread(to, 1, size, file_) != size) fprintf(stderr, "input ends early\n"), exit(2);
  }

  FILE* file_;
  std::vector<Memory> arrays_;
};

Components components_of(Input& in) {
  Components c{};
  c.block = in.number();
  int64_t size = 0;
  c.codes = in.array<uint8_t>(&size), c.end = c.codes + size;
  c.first = in.array<int32_t>(), c.place = in.array<int32_t>(), c.bits = in.array<uint8_t>(), c.table = in.array<int32_t>();
  c.points = in.array<float>();
  return c;
}

Codewords words_of(Input& in, const Rows& rows) {
  Codewords c{};
  c.form = Form(in.number());
  const bool shared = in.number();
  c.row = in.number(), c.head = shared ? 0 : rows.count * c.row, c.size = int(in.number()), c.count = int(in.number()), c.alike = in.number();
  int64_t size = 0;
  c.codes = in.array<uint8_t>(&size), c.end = c.codes + size;
  c.place = in.array<int32_t>(), c.bits = in.array<uint8_t>(), c.table = in.array<int64_t>(), c.values = in.array<float>();
  c.halves = in.array<uint16_t>();
  c.span = in.array<int32_t>(), c.order = in.array<int32_t>(), c.exact = in.array<float>();
  return c;
}

Rows rows_of(Input& in) {
  Rows rows{};
  rows.type = Type(in.number());
  rows.heads = int(in.number()), rows.count = int(in.number()), rows.dim = int(in.number()), rows.stages = int(in.number());
  const int64_t size = rows.type == Type::FLOAT32 ? 4 : 2;
  rows.data = in.array<uint8_t>(), rows.row = rows.dim * size, rows.head = rows.count * rows.row;
  for (int i = 0; i < rows.stages; i++) {
    Stage& stage = rows.stage[i];
    stage.bits = int(in.number());
    int64_t bytes = 0;
    stage.codes = in.array<uint8_t>(&bytes), stage.end = stage.codes + bytes;
    stage.head = bytes / rows.heads, stage.row = stage.head / rows.count;
    stage.table = in.array<float>();
  }
  rows.scale = {in.array<uint16_t>(), false}, rows.mean = in.array<float>();
  rows.group = int(in.number()), rows.by_token = in.number() != 0;
  rows.step = {in.array<uint16_t>(), false}, rows.zero = {in.array<uint16_t>(), false};
  rows.odd = int(in.number());
  rows.signs = in.array<float>(), rows.hartley = in.array<float>();
  const float* smooth = in.array<float>();
  if (smooth) rows.signs = smooth, rows.signs_head = rows.dim;
  int64_t turned = 0;
  rows.turns = in.array<float>(&turned), rows.blocks = int(turned / (2 * rows.dim * int64_t(sizeof(float))));
  rows.components = components_of(in), rows.sizes = components_of(in);
  rows.basis = in.array<float>(), rows.mix = in.array<float>();
  rows.words = words_of(in, rows);
  return rows;
}

float* aligned(std::vector<float>& memory, size_t size) {
  memory.resize(size + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

void put(FILE* to, const std::vector<float>& x) {
  if (fwrite(x.data(), sizeof(float), x.size(), to) != x.size()) perror("output"), exit(2);
}

void decoded(const Level& level, const Rows& rows, FILE* to) {
  std::vector<float> out(size_t(rows.heads) * rows.count * rows.dim);
  for (int head = 0; head < rows.heads; head++) level.decode(rows, head, 0, rows.count, out.data() + int64_t(head) * rows.count * rows.dim);
  put(to, out);
}

void problem(const Level& level, Pool& pool, Input& in, FILE* to) {
  Problem p{};
  p.keys = rows_of(in), p.values = rows_of(in);
  p.count = p.keys.count, p.rows = int(in.number());
  p.q = in.array<float>(), p.first = in.array<int32_t>(), p.stop = in.array<int32_t>();
  p.rope_first = int(in.number()), p.half = int(in.number()), p.paired = in.number() != 0, p.angles = in.array<float>();
  p.seen = Seen(in.number());
  const uint8_t* mask = in.array<uint8_t>();
  std::vector<const uint8_t*> masks;  // a row for each query of each head
  const int64_t wide = int64_t(p.count) * (p.seen == Seen::BOOL ? 1 : p.seen == Seen::FLOAT32 ? 4 : 2);
  for (int i = 0; mask && i < p.keys.heads * p.rows; i++) masks.push_back(mask + i * wide);
  p.mask = mask ? masks.data() : nullptr;
  p.padded_rows = p.rows < 3 ? p.rows : (p.rows + 3) / 4 * 4;
  p.dim = (p.keys.dim + 15) / 16 * 16, p.dim_v = (p.values.dim + 15) / 16 * 16;
  p.span = p.count < 1024 ? 32 : 1088;
  p.chunk = 2 * p.span, p.chunks = (p.count + p.chunk - 1) / p.chunk;
  const int heads = p.keys.heads;
  const bool predicted = p.values.mix;
  const size_t every = size_t(heads) * p.padded_rows;
  const size_t scratch = predicted ? level.attend_components_scratch(p) : level.attend_scratch(p);
  std::vector<float> a, b, c, d, e, f, out(size_t(heads) * p.rows * p.values.dim), lse(size_t(heads) * p.rows), total(lse.size());
  p.turned = aligned(a, every * p.dim), p.by_mean = aligned(b, every);
  p.sums = aligned(c, every * p.chunks * p.dim_v), p.states = aligned(d, every * p.chunks * 3);
  float* scratches = aligned(e, scratch * pool.threads());
  if (predicted) p.shared = aligned(f, size_t(heads) * p.rows * p.chunks * ((p.keys.components.first[heads] + 15) / 16 * 16));
  for (int head = 0; head < heads; head++) level.prepare(p, head);
  if (predicted)
    pool.run(p.chunks, [&](int i, int thread) { level.attend_components(p, i, scratches + scratch * thread); });
  else
    pool.run(heads * p.chunks, [&](int i, int thread) { level.attend(p, i % heads, i % heads + 1, i / heads, scratches + scratch * thread); });
  const Found found{&p, 0};
  std::fill(lse.begin(), lse.end(), -INFINITY);
  const Merging m{&found, 1, 1, p.rows, 0, p.rows, out.data(), lse.data(), total.data()};
  for (int head = 0; head < heads; head++) level.merge(m, head);
  for (size_t i = 0; i < lse.size(); i++) {
    for (int d = 0; d < p.values.dim; d++) out[i * p.values.dim + d] /= total[i] == 0 ? 1 : total[i];
    lse[i] += std::log(total[i]);
  }
  put(to, out), put(to, lse);
  decoded(level, p.keys, to);
  if (!predicted) decoded(level, p.values, to);
}

}  // namespace

int main(int, char** arguments) {
  for (const Level* level : LEVELS) {
    if (strcmp(level->name, arguments[1])) continue;
    Input in(arguments[2]);
    FILE* to = fopen(arguments[3], "wb");
    if (!to) return perror(arguments[3]), 2;
    Pool pool(3);
    while (in.more()) problem(*level, pool, in, to);
    return fclose(to) ? 2 : 0;
  }
  fprintf(stderr, "no level %s\n", arguments[1]);
  return 2;
}
