// Packing and unpacking without Python: run_streams LEVEL IN OUT.
//
// IN holds cases: bits, whether in words, how many codes and how many bytes they take, 64-bit, then the codes; OUT their bytes and the codes
// unpacked from those. The arrays are as large as they must be, for a sanitizer to see what goes beyond.
#include <cstdio>
#include <cstring>
#include <vector>

#include "streams.hpp"

using namespace kvtool;

int main(int, char** arguments) {
  const struct {
    const char* name;
    const Streamer* streamer;
  } levels[] = {
#ifdef KVTOOL_X86
      {"avx512", &avx512_streamer},
      {"avx2", &avx2_streamer},
#endif
#ifdef KVTOOL_ARM64
      {"neon", &neon_streamer},
#endif
      {"baseline", &baseline_streamer},
  };
  for (const auto& level : levels) {
    if (strcmp(level.name, arguments[1])) continue;
    FILE *in = fopen(arguments[2], "rb"), *out = fopen(arguments[3], "wb");
    if (!in || !out) return perror("run_streams"), 2;
    int64_t given[4];
    while (fread(given, sizeof given, 1, in)) {
      const int64_t count = given[2];
      std::vector<uint8_t> codes(count), packed(given[3]), back(count);
      if (fread(codes.data(), 1, count, in) != size_t(count)) return 2;
      level.streamer->pack(codes.data(), count, int(given[0]), given[1], packed.data());
      level.streamer->unpack(packed.data(), count, int(given[0]), given[1], back.data());
      fwrite(packed.data(), 1, packed.size(), out), fwrite(back.data(), 1, back.size(), out);
    }
    return fclose(out) ? 2 : 0;
  }
  fprintf(stderr, "no level %s\n", arguments[1]);
  return 2;
}
