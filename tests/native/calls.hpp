// What the calls of `run_calls.cpp` share: a level's functions, and parts of their rows. Where the extension calls a function for a part
// of its rows at a time, so do they: for those before a number that the file gives, and for the rest.
#pragma once
#include "calibrated.hpp"
#include "coding.hpp"
#include "file.hpp"
#include "kernels.hpp"
#include "search.hpp"
#include "streams.hpp"

namespace kvtool {

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

inline Reals reals_of(File& in) {
  const Type type = Type(in.number());
  return {type, in.array<uint8_t>()};
}

// Tables of cosines and sines: pages of `each` rows. They last as long as what is given for them.
inline Angles angles_of(File& in, std::vector<const float*>& pages) {
  const int64_t count = in.number();
  Angles angles{};
  for (int64_t i = 0; i < count; i++) pages.push_back(in.array<float>());
  angles.each = int(in.number()), angles.first = int(in.number()), angles.half = int(in.number());
  angles.pages = count ? pages.data() : nullptr;
  return angles;
}

}  // namespace kvtool
