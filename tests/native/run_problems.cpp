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

#include "file.hpp"
#include "pool.hpp"

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

void put(FILE* to, const std::vector<float>& x) {
  if (fwrite(x.data(), sizeof(float), x.size(), to) != x.size()) perror("output"), exit(2);
}

void decoded(const Level& level, const Rows& rows, FILE* to) {
  std::vector<float> out(size_t(rows.heads) * rows.count * rows.dim);
  for (int head = 0; head < rows.heads; head++) level.decode(rows, head, 0, rows.count, out.data() + int64_t(head) * rows.count * rows.dim);
  put(to, out);
}

void problem(const Level& level, Pool& pool, File& in, FILE* to) {
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
  std::vector<float> out(size_t(heads) * p.rows * p.values.dim), lse(size_t(heads) * p.rows), total(lse.size());
  p.turned = in.scratch(every * p.dim), p.by_mean = in.scratch(every);
  p.sums = in.scratch(every * p.chunks * p.dim_v), p.states = in.scratch(every * p.chunks * 3);
  float* scratches = in.scratch(scratch * pool.threads());
  if (predicted) p.shared = in.scratch(size_t(heads) * p.rows * p.chunks * ((p.keys.components.first[heads] + 15) / 16 * 16));
  for (int head = 0; head < heads; head++) level.prepare(p, head);
  if (predicted)
    pool.run(p.chunks, [&](int i, int thread) { level.attend_components(p, i, scratches + scratch * thread); });
  else
    pool.run(heads * p.chunks, [&](int i, int thread) { level.attend(p, i % heads, i % heads + 1, i / heads,
        scratches + scratch * thread); });
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
    File in(arguments[2]);
    FILE* to = fopen(arguments[3], "wb");
    if (!to) return perror(arguments[3]), 2;
    Pool pool(3);
    for (; in.more(); in.finish(to)) problem(*level, pool, in, to);
    return fclose(to) ? 2 : 0;
  }
  fprintf(stderr, "no level %s\n", arguments[1]);
  return 2;
}
