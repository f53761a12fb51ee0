// Numbers and arrays of a file, and rows made of them, as tests/native_problems.py writes them. Every array is in memory of just its size,
// for a sanitizer to see what goes beyond it.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "problem.hpp"

namespace kvtool {

// Memory that nothing has been written to. Clang's sanitizer knows it as such; elsewhere its bytes are ones that no call would write.
inline void* unwritten(void* at, int byte, size_t size) {
#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
  return at;
#endif
#endif
  return memset(at, byte, size);
}

class File {
 public:
  explicit File(const char* path) : file_(fopen(path, "rb")) {
    if (!file_) perror(path), exit(2);
  }
  ~File() { fclose(file_); }

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

  float real() {
    double value;
    read(&value, sizeof value);
    return float(value);
  }

  // nullptr for an empty array.
  template <class T>
  const T* array(int64_t* bytes = nullptr) {
    const int64_t size = number();
    if (bytes) *bytes = size;
    if (!size) return nullptr;
    arrays_.push_back(Memory(malloc(size)));
    read(arrays_.back().get(), size);
    return static_cast<const T*>(arrays_.back().get());
  }

  // Memory that a call is to write whole.
  template <class T>
  T* result() {
    const int64_t size = number();
    arrays_.push_back(Memory(unwritten(malloc(size), 0xA5, size)));
    results_.push_back({arrays_.back().get(), size_t(size)});
    return static_cast<T*>(arrays_.back().get());
  }

  // Zeros, for what is added to.
  template <class T>
  T* sums() {
    T* at = result<T>();
    memset(at, 0, results_.back().size);
    return at;
  }

  // Working memory, aligned to a cache line; NaN, for no result may depend on what was in it.
  float* scratch(size_t floats) {
    void* at = nullptr;
    if (posix_memalign(&at, 64, floats * sizeof(float))) perror("memory"), exit(2);
    arrays_.push_back(Memory(unwritten(at, 0xff, floats * sizeof(float))));
    return static_cast<float*>(at);
  }

  // Everything so far: results go to the file, and all memory is given back.
  void finish(FILE* to) {
    for (const Result& one : results_)
      if (fwrite(one.at, 1, one.size, to) != one.size) perror("output"), exit(2);
    results_.clear(), arrays_.clear();
  }

 private:
  struct Free {
    void operator()(void* p) const { free(p); }
  };
  using Memory = std::unique_ptr<void, Free>;
  struct Result {
    const void* at;
    size_t size;
  };

  void read(void* to, size_t size) {
    if (fread(to, 1, size, file_) != size) fprintf(stderr, "input ends early\n"), exit(2);
  }

  FILE* file_;
  std::vector<Memory> arrays_;
  std::vector<Result> results_;
};

inline Components components_of(File& in) {
  Components c{};
  c.block = in.number();
  int64_t size = 0;
  c.codes = in.array<uint8_t>(&size), c.end = c.codes + size;
  c.first = in.array<int32_t>(), c.place = in.array<int32_t>(), c.bits = in.array<uint8_t>(), c.table = in.array<int32_t>();
  c.points = in.array<float>();
  return c;
}

inline Codewords words_of(File& in, const Rows& rows) {
  Codewords c{};
  c.form = Form(in.number());
  const bool shared = in.number();
  c.row = in.number(), c.head = shared ? 0 : rows.count * c.row, c.size = int(in.number()), c.count = int(in.number()),
      c.alike = in.number();
  int64_t size = 0;
  c.codes = in.array<uint8_t>(&size), c.end = c.codes + size;
  c.place = in.array<int32_t>(), c.bits = in.array<uint8_t>(), c.table = in.array<int64_t>(), c.values = in.array<float>();
  c.halves = in.array<uint16_t>();
  c.span = in.array<int32_t>(), c.order = in.array<int32_t>(), c.exact = in.array<float>();
  return c;
}

inline Rows rows_of(File& in) {
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

}  // namespace kvtool
