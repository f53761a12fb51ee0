// Single calls of a level's functions, without Python: run_calls LEVEL IN OUT.
//
// IN holds calls: the name of a function, then what it reads in its header, in that order; OUT what each wrote.
#include "coder_calls.hpp"
#include "function_calls.hpp"

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

const Functions LEVELS[] = {
#ifdef KVTOOL_X86
    KVTOOL_LISTED(avx512), KVTOOL_LISTED(avx2),
#endif
#ifdef KVTOOL_ARM64
    KVTOOL_LISTED(neon),
#endif
    KVTOOL_LISTED(baseline),
};

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
