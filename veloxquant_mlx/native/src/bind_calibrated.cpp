// Tables of calibrated codecs, checked once, and the coding of rows by them. No pointer leaves here unchecked.
#include <atomic>
#include <cmath>

#include "calibrated.hpp"
#include "stored.hpp"

namespace kvtool {
namespace {

constexpr int KEY_CHUNK = 512;   // tokens of a head that a thread takes at a time
constexpr int VALUE_CHUNK = 64;  // of all heads
using Table = std::vector<float>;
using Codes = nb::ndarray<uint8_t, nb::shape<1, -1, -1>, nb::c_contig, nb::device::cpu>;
using Sizes = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Written = nb::ndarray<nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// Boundaries in the order that a search by halves asks for them: of step s, 2^s of them, repeated to at least 16.
Table search_table(const Table& boundaries, int bits) {
  if (boundaries.size() + 1 != size_t(1) << bits) refuse("boundaries", std::to_string((1 << bits) - 1), std::to_string(boundaries.size()));
  for (size_t i = 0; i < boundaries.size(); i++)
    if (!std::isfinite(boundaries[i]) || (i && boundaries[i - 1] >= boundaries[i])) refuse("boundaries", "finite and ascending", "others");
  Table found;
  for (int step = 0; step < bits; step++) {
    const int some = 1 << step, half = 1 << (bits - 1 - step);
    for (int i = 0; i < std::max(some, 16); i++) found.push_back(boundaries[(2 * (i % some) + 1) * half - 1]);
  }
  return found;
}

// A matrix (rows, n) of which PANEL rows lie together, column by column; rows beyond the last are zero.
void panels_of(const float* from, int64_t row, int64_t column, int rows, int columns, Table& to) {
  for (int i = 0; i < rows; i += PANEL)
    for (int j = 0; j < columns; j++)
      for (int r = i; r < i + PANEL; r++) to.push_back(r < rows ? from[r * row + j * column] : 0);
}

// What rows are projected on: the components of each head.
class ProjectionTables {
 public:
  Projection view{};

  ProjectionTables(const Bounds& first, const F32<2>& mean, const F32<2>& forward)
      : first_(first.data(), first.data() + first.size()), mean_(mean.data(), mean.data() + mean.size()) {
    const int heads = int(mean.shape(0)), dim = int(mean.shape(1));
    if (dim < 1 || dim > MAX_DIM) refuse("mean", "(H, D) with D at most " + std::to_string(MAX_DIM), shape(mean));
    if (int(first_.size()) != heads + 1 || first_[0] != 0) refuse("first", "of " + std::to_string(heads) + " heads, from 0", std::to_string(first_.size()));
    panels_.push_back(0);
    for (int h = 0; h < heads; h++) {
      const int own = first_[h + 1] - first_[h];
      if (own < 0 || own > dim) refuse("first", "ascending by at most D", std::to_string(own));
      panels_.push_back(panels_[h] + (own + PANEL - 1) / PANEL);
    }
    check("forward", forward, {first_[heads], dim});
    for (int h = 0; h < heads; h++) panels_of(forward.data() + int64_t(first_[h]) * dim, dim, 1, first_[h + 1] - first_[h], dim, forward_);
    view = {heads, dim, first_.data(), mean_.data(), forward_.data(), panels_.data()};
  }
  ProjectionTables(const ProjectionTables&) = delete;
  ProjectionTables& operator=(const ProjectionTables&) = delete;

 private:
  std::vector<int32_t> first_, panels_;
  Table mean_, forward_;
};

// The cells of scalar quantisers: each is of a kind, with the boundaries of which there are several.
class CellTables {
 public:
  Cells view{};

  CellTables(const int32_t* kinds, size_t count, const std::vector<Table>& boundaries) {
    std::vector<int> bits, at;
    for (const Table& own : boundaries) {
      int width = 1;
      while (width < 8 && (size_t(1) << width) - 1 < own.size()) width++;
      const Table search = search_table(own, width);
      bits.push_back(width), at.push_back(int(tables_.size()));
      tables_.insert(tables_.end(), search.begin(), search.end());
    }
    for (size_t i = 0; i < count; i++) {
      const int kind = kinds[i];
      if (kind < 0 || kind >= int(boundaries.size())) refuse("kinds", "below " + std::to_string(boundaries.size()), std::to_string(kind));
      table_.push_back(at[kind]), bits_.push_back(uint8_t(bits[kind])), place_.push_back(int32_t(view.block));
      view.block += bits[kind] * TOGETHER / 8;
    }
    view.boundaries = tables_.data(), view.table = table_.data(), view.bits = bits_.data(), view.place = place_.data();
  }
  CellTables(const CellTables&) = delete;
  CellTables& operator=(const CellTables&) = delete;

 private:
  Table tables_;
  std::vector<int32_t> table_, place_;
  std::vector<uint8_t> bits_;
};

Rows floats_of(const char* name, const Stored& stored, const Projection& to) {
  const Rows& rows = stored.rows;
  stored.check_complete();
  if (rows.type > Type::BFLOAT16) refuse(name, "rows of floats", "codes");
  if (rows.heads != to.heads || rows.dim != to.dim)
    refuse(name, "(" + std::to_string(to.heads) + ", S, " + std::to_string(to.dim) + ")", "(" + std::to_string(rows.heads) + ", S, " + std::to_string(rows.dim) + ")");
  return rows;
}

// Chunks of tokens, `each` items side by side; scratch memory for every thread begins on a cache line.
template <class Item>
bool in_chunks(int count, int chunk, int each, size_t floats, const Item& item) {
  const std::shared_ptr<Pool> threads = the_pool();
  const int chunks = (count + chunk - 1) / chunk;
  const size_t apart = (floats + 31) / 16 * 16;
  std::vector<float> memory(apart * threads->threads() + 16);
  float* scratch = memory.data() + (64 - uintptr_t(memory.data()) % 64) % 64 / sizeof(float);
  std::atomic<bool> fine{true};
  const WithoutGil free;
  threads->run(each * chunks, [&](int i, int thread) {
    const int start = i / each * chunk;
    if (fine && !item(i % each, start, std::min(chunk, count - start), scratch + apart * thread)) fine = false;
  });
  return fine;
}

int64_t blocks_of(int count) { return (int64_t(count) + TOGETHER - 1) / TOGETHER; }

class KeyCoder {
 public:
  KeyCoder(const Bounds& first, const F32<2>& mean, const F32<2>& forward, const Bounds& kinds, const std::vector<Table>& boundaries)
      : to_(first, mean, forward), cells_(kinds.data(), kinds.size(), boundaries) {
    if (int(kinds.size()) != to_.view.first[to_.view.heads]) refuse("kinds", "one for each component", std::to_string(kinds.size()));
  }

  bool encode(const Stored& x, const Codes& codes) const {
    const KeyCoding c{to_.view, cells_.view, floats_of("x", x, to_.view), codes.data()};
    check("codes", codes, {1, blocks_of(c.x.count), c.cells.block});
    expect_writes(codes.data(), codes.nbytes());
    const Calibrated& now = *level().calibrated;
    return in_chunks(c.x.count, KEY_CHUNK, c.to.heads, now.key_scratch(c.to), [&](int head, int from, int count, float* scratch) {
      return now.encode_keys(c, head, from, count, scratch);
    });
  }

 private:
  ProjectionTables to_;
  CellTables cells_;
};

class ValueCoder {
 public:
  // Boundaries and points of each number of bits in use; of each head, which.
  ValueCoder(
      const Bounds& first, const F32<2>& k_mean, const F32<2>& forward, const F32<2>& v_mean, const F32<2>& mix, const Bounds& kinds,
      const std::vector<Table>& boundaries, const std::vector<Table>& points, const F32<1>& signs, const F32<2>& hartley)
      : to_(first, k_mean, forward), mean_(v_mean.data(), v_mean.data() + v_mean.size()), kinds_(every(kinds, to_.view)),
        cells_(kinds_.data(), kinds_.size(), boundaries), signs_(signs), hartley_(hartley) {
    const int heads = to_.view.heads, dim = to_.view.dim, used = to_.view.first[heads];
    check("v_mean", v_mean, {heads, dim}), check("mix", mix, {used, int64_t(heads) * dim}), check("signs", signs, {dim});
    const int odd = int(hartley.shape(0)), power = odd ? dim / odd : 0;
    check("hartley", hartley, {odd, odd});
    if (odd < 1 || odd * power != dim || (power & (power - 1))) refuse("hartley", "(m, m) with D = m 2^k", shape(hartley));
    if (points.size() != boundaries.size()) refuse("points", std::to_string(boundaries.size()) + " tables", std::to_string(points.size()));
    mix_.reserve(size_t(heads) * used * ((dim + PANEL - 1) / PANEL * PANEL));
    for (int h = 0; h < heads; h++)
      for (int k = 0; k < heads; k++)
        panels_of(mix.data() + int64_t(to_.view.first[k]) * heads * dim + int64_t(h) * dim, 1, int64_t(heads) * dim, dim, to_.view.first[k + 1] - to_.view.first[k], mix_);
    std::vector<int32_t> at;
    for (size_t i = 0; i < points.size(); i++) {
      if (points[i].size() != boundaries[i].size() + 1) refuse("points", "one more than boundaries", std::to_string(points[i].size()));
      at.push_back(int32_t(points_.size()));
      for (size_t j = 0; j < std::max<size_t>(16, points[i].size()); j++) points_.push_back(points[i][j % points[i].size()]);
    }
    for (int h = 0; h < heads; h++) point_.push_back(at[kinds.data()[h]]);
    coding_.to = to_.view, coding_.mean = mean_.data(), coding_.mix = mix_.data(), coding_.signs = signs.data(), coding_.hartley = hartley.data();
    coding_.odd = odd, coding_.cells = cells_.view, coding_.points = points_.data(), coding_.point = point_.data();
  }

  bool encode(const Stored& x, const Stored& keys, const Codes& codes, const Sizes& sizes) const {
    ValueCoding c = coding_;
    c.x = floats_of("x", x, c.to), c.keys = floats_of("keys", keys, c.to);
    if (c.keys.count != c.x.count) refuse("keys", "of " + std::to_string(c.x.count) + " tokens", std::to_string(c.keys.count));
    check("codes", codes, {1, blocks_of(c.x.count), c.cells.block}), check("sizes", sizes, {c.to.heads, c.x.count});
    c.codes = codes.data(), c.sizes = sizes.data();
    expect_writes(codes.data(), codes.nbytes());
    const Calibrated& now = *level().calibrated;
    return in_chunks(c.x.count, VALUE_CHUNK, 1, now.value_scratch(c.to), [&](int, int from, int count, float* scratch) {
      return now.encode_values(c, from, count, scratch);
    });
  }

  // Of codes and scales as `Stored` has them.
  void decode(const Stored& values, const Stored& keys, const Written& out, bool bfloat) const {
    ValueCoding c = coding_;
    c.keys = floats_of("keys", keys, c.to);
    const Rows& rows = values.rows;
    if (rows.type != Type::COMPONENTS || !rows.sizes.first || rows.heads != c.to.heads || rows.dim != c.to.dim || rows.count != c.keys.count)
      refuse("values", "components and sizes of as many rows as the keys", "others");
    for (int h = 0; h < rows.heads; h++)
      if (rows.components.first[h + 1] - rows.components.first[h] != rows.dim)
        refuse("components", "D for a head of values", std::to_string(rows.components.first[h + 1] - rows.components.first[h]));
    check("out", out, {c.to.heads, c.keys.count, c.to.dim});
    const bool real = out.dtype() == nb::dtype<float>();
    if (real ? bfloat : out.dtype() != nb::dtype<uint16_t>()) refuse("out", "float32, or 16-bit floats as uint16", std::to_string(out.dtype().bits) + " bits");
    c.type = real ? Type::FLOAT32 : bfloat ? Type::BFLOAT16 : Type::FLOAT16, c.out = static_cast<uint8_t*>(out.data());
    c.components = rows.components, c.scales = rows.sizes;
    expect_writes(out.data(), out.nbytes());
    const Calibrated& now = *level().calibrated;
    in_chunks(c.keys.count, VALUE_CHUNK, 1, now.value_scratch(c.to), [&](int, int from, int count, float* scratch) {
      now.decode_values(c, from, count, scratch);
      return true;
    });
  }

 private:
  ProjectionTables to_;
  Table mean_, mix_, points_;
  std::vector<int32_t> kinds_, point_;
  CellTables cells_;
  F32<1> signs_;
  F32<2> hartley_;
  ValueCoding coding_{};

  // The kind of every component of the values.
  static std::vector<int32_t> every(const Bounds& kinds, const Projection& to) {
    if (int(kinds.size()) != to.heads) refuse("kinds", "one for each head", std::to_string(kinds.size()));
    std::vector<int32_t> found;
    for (int i = 0; i < to.heads * to.dim; i++) found.push_back(kinds.data()[i / to.dim]);
    return found;
  }
};

}  // namespace

void bind_calibrated(nb::module_& m) {
  nb::class_<KeyCoder>(m, "KeyCoder")
      .def(nb::init<const Bounds&, const F32<2>&, const F32<2>&, const Bounds&, const std::vector<Table>&>(), nb::arg("first"), nb::arg("mean"),
           nb::arg("forward"), nb::arg("kinds"), nb::arg("boundaries"))
      .def("encode", &KeyCoder::encode, nb::arg("x"), nb::arg("codes"));
  nb::class_<ValueCoder>(m, "ValueCoder")
      .def(nb::init<const Bounds&, const F32<2>&, const F32<2>&, const F32<2>&, const F32<2>&, const Bounds&, const std::vector<Table>&,
                    const std::vector<Table>&, const F32<1>&, const F32<2>&>(),
           nb::arg("first"), nb::arg("k_mean"), nb::arg("forward"), nb::arg("v_mean"), nb::arg("mix"), nb::arg("kinds"), nb::arg("boundaries"),
           nb::arg("points"), nb::arg("signs"), nb::arg("hartley"))
      .def("encode", &ValueCoder::encode, nb::arg("x"), nb::arg("keys"), nb::arg("codes"), nb::arg("sizes"))
      .def("decode", &ValueCoder::decode, nb::arg("values"), nb::arg("keys"), nb::arg("out"), nb::arg("bfloat"));
}

}  // namespace kvtool
