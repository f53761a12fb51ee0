// Rows from one rotary embedding to another without Python: run_turns LEVEL IN OUT.
//
// IN holds cases: type, heads, rows, D, first and half of the turned entries, whether pairs are neighbours in and out, whether there is a
// second table, 64-bit; the tables to undo and to redo, (rows, 2 half) float; then the rows. OUT holds rows. The arrays are as large as
// they must be, for a sanitizer to see what goes beyond.
#include <cstdio>
#include <cstring>
#include <vector>

#include "problem.hpp"

namespace kvtool {
#define KVTOOL_TURN(level) \
  namespace in_##level {   \
  void turn(const Turning&, int start, int stop); \
  }
KVTOOL_TURN(baseline)
#ifdef KVTOOL_X86
KVTOOL_TURN(avx2)
KVTOOL_TURN(avx512)
#endif
#ifdef KVTOOL_ARM64
KVTOOL_TURN(neon)
#endif
}  // namespace kvtool

using namespace kvtool;

int main(int, char** arguments) {
  const struct {
    const char* name;
    void (*turn)(const Turning&, int, int);
  } levels[] = {
#ifdef KVTOOL_X86
      {"avx512", &in_avx512::turn},
      {"avx2", &in_avx2::turn},
#endif
#ifdef KVTOOL_ARM64
      {"neon", &in_neon::turn},
#endif
      {"baseline", &in_baseline::turn},
  };
  for (const auto& level : levels) {
    if (strcmp(level.name, arguments[1])) continue;
    FILE *in = fopen(arguments[2], "rb"), *out = fopen(arguments[3], "wb");
    if (!in || !out) return perror("run_turns"), 2;
    int64_t given[9];
    while (fread(given, sizeof given, 1, in)) {
      Turning t{};
      t.type = Type(given[0]), t.heads = int(given[1]), t.count = int(given[2]), t.dim = int(given[3]);
      t.first = int(given[4]), t.half = int(given[5]), t.paired_in = given[6], t.paired_out = given[7], t.ratio = 1;
      const size_t size = t.type == Type::FLOAT32 ? 4 : 2, entries = size_t(t.count) * 2 * t.half;
      std::vector<float> tables[2];
      const float* pages[2];
      Angles* sides[2] = {&t.undo, &t.redo};
      for (int i = 0; i <= given[8]; i++) {
        tables[i].resize(entries);
        if (fread(tables[i].data(), sizeof(float), entries, in) != entries) return 2;
        pages[i] = tables[i].data(), *sides[i] = {&pages[i], t.count, 0, t.half};
      }
      std::vector<uint8_t> x(size * t.heads * t.count * t.dim), turned(x.size());
      if (fread(x.data(), 1, x.size(), in) != x.size()) return 2;
      t.x = x.data(), t.row = int64_t(size) * t.dim, t.head = t.row * t.count, t.out = turned.data();
      for (int s = 0; s < t.count; s += TILE) level.turn(t, s, s + TILE < t.count ? s + TILE : t.count);
      fwrite(turned.data(), 1, turned.size(), out);
    }
    return fclose(out) ? 2 : 0;
  }
  fprintf(stderr, "no level %s\n", arguments[1]);
  return 2;
}
