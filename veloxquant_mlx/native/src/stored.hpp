// Stored rows, checked once; the arrays that they point into.
#pragma once
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>

#include <variant>

#include "bindings.hpp"

namespace kvtool {

// The quantisers of components, checked once, for any number of `Stored`: where each head's begin, their bits, and the points of each component
// one after another.
struct Quantisers {
  std::vector<int32_t> first, place, table;
  std::vector<uint8_t> bits;
  std::vector<float> points;
  int64_t block = 0;  // bytes of a block of codes

  Quantisers(const Bounds& given, const Words<1>& widths, const F32<1>& values) : first(given.data(), given.data() + given.size()) {
    if (first.empty() || first[0] != 0) refuse("first", "ascending from 0", first.empty() ? "none" : std::to_string(first[0]));
    for (size_t h = 1; h < first.size(); h++)
      if (first[h - 1] > first[h]) refuse("first", "ascending from 0", std::to_string(first[h - 1]));
    check("bits", widths, {first.back()});
    int64_t at = 0;
    for (int i = 0; i < first.back(); i++) {
      const int width = widths.data()[i], size = 1 << width;
      if (width < 1 || width > 8) refuse("bits", "1 to 8", std::to_string(width));
      if (at + size > int64_t(values.shape(0))) refuse("points", "2^bits for each component", std::to_string(values.shape(0)));
      bits.push_back(uint8_t(width)), place.push_back(int32_t(block)), table.push_back(int32_t(points.size()));
      for (int j = 0; j < std::max(size, 16); j++) points.push_back(values.data()[at + j % size]);
      block += width * TOGETHER / 8, at += size;
    }
    if (at != int64_t(values.shape(0))) refuse("points", std::to_string(at) + " of all components", std::to_string(values.shape(0)));
  }
};

// bfloat16 as its words, or float32.
template <int N>
using Sides = std::variant<Words<N>, F32<N>>;

template <int N>
Side side_of(const char* name, const Sides<N>& given, const std::vector<int64_t>& sizes) {
  return std::visit([&](const auto& side) { return check(name, side, sizes), Side{side.data(), sizeof(*side.data()) == 4}; }, given);
}

// The arrays that a `Rows` points into live as long as it does.
class Stored {
 public:
  Rows rows{};

  Stored(int heads, int count, int dim) {
    if (heads < 0 || count < 0 || dim < 1 || dim > MAX_DIM)
      refuse("shape", "(H, S, D) with D at most " + std::to_string(MAX_DIM), "(" + std::to_string(heads) + ", " + std::to_string(count) + ", " + std::to_string(dim) + ")");
    rows.heads = heads, rows.count = count, rows.dim = dim;
  }

  void floats(const Floats& data, bool bfloat) {
    check("data", data, {rows.heads, rows.count, rows.dim});
    const auto type = data.dtype();
    const bool word = type == nb::dtype<uint16_t>(), real = type == nb::dtype<float>();
    const bool half = type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16;
    if (!(bfloat ? word : real || half) || (data.shape(2) > 1 && data.stride(2) != 1))
      refuse("data", bfloat ? "uint16 of bfloat16, D contiguous" : "float16 or float32, D contiguous", std::to_string(type.bits) + " bits");
    rows.type = bfloat ? Type::BFLOAT16 : real ? Type::FLOAT32 : Type::FLOAT16;
    const int64_t size = type.bits / 8;
    rows.data = static_cast<const uint8_t*>(data.data()), rows.head = data.stride(0) * size, rows.row = data.stride(1) * size;
    data_ = data;
  }

  void codes(const Bytes& codes, int bits, const std::optional<std::vector<float>>& table) { codes_of(codes, bits, rows.dim, table); }

  void scale(const Sides<2>& scale) { rows.scale = side_of<2>("scale", scale, {rows.heads, rows.count}), scale_ = scale; }

  void mean(const F32<2>& mean) {
    check("mean", mean, {rows.heads, rows.dim});
    rows.mean = mean.data(), mean_ = mean;
  }

  void affine(const Sides<3>& step, const Sides<3>& zero, int group, bool by_token) {
    const int most = INT32_MAX - std::max(rows.count, rows.dim);  // the end of a group is an int, too
    if (group < 1 || group > most) refuse("group", "1 to " + std::to_string(most), std::to_string(group));
    if (step.index() != zero.index()) refuse("zero", step.index() ? "float32 as step is" : "uint16 of bfloat16 as step is", "the other");
    auto groups = [&](int64_t size) { return (size + group - 1) / group; };
    const std::vector<int64_t> sides = by_token ? std::vector<int64_t>{rows.heads, rows.count, groups(rows.dim)}
                                                : std::vector<int64_t>{rows.heads, groups(rows.count), rows.dim};
    rows.step = side_of<3>("step", step, sides), rows.zero = side_of<3>("zero", zero, sides);
    rows.group = group, rows.by_token = by_token, step_ = step, zero_ = zero;
  }

  void rotation(const F32<1>& signs, const F32<2>& hartley) {
    check("signs", signs, {rows.dim});
    const int odd = int(hartley.shape(0)), power = odd ? rows.dim / odd : 0;
    check("hartley", hartley, {odd, odd});
    if (odd < 1 || odd * power != rows.dim || (power & (power - 1))) refuse("hartley", "(m, m) with D = m 2^k", shape(hartley));
    rows.signs = signs.data(), rows.hartley = hartley.data(), rows.odd = odd, signs_ = signs, hartley_ = hartley;
  }

  // What rows of codewords are multiplied by after their transform, for each head: D is a power of two.
  void smooth(const F32<2>& factors) {
    check("smooth", factors, {rows.heads, rows.dim});
    if (rows.dim & (rows.dim - 1)) refuse("smooth", "that of rows of 2^k entries", std::to_string(rows.dim));
    rows.signs = factors.data(), rows.signs_head = rows.dim, rows.odd = 1, smooth_ = factors;
  }

  // Codes of codewords: bits and the bit of a row where each code lies, (H, n); where its codewords begin in `values`, each of `size` entries
  // one after another; and what makes entries of them. A stride of 0 between heads: a row's codes are those of all heads.
  void codewords(
      int form, const Bytes& codes, int size, const I32<2>& place, const I32<2>& bits, const I64<2>& table, const Values1& values,
      const std::optional<Bounds>& order, const std::optional<F32<2>>& exact) {
    const int heads = rows.heads, count = int(place.shape(1)), entries = form == int(Form::PARTS) ? 1 : size;
    if (form < 0 || form > int(Form::PARTS)) refuse("form", "0 to 2", std::to_string(form));
    if (entries != (form == int(Form::PARTS) ? 1 : form == int(Form::PLANES) ? 2 : std::clamp(size, 1, 8)) || size != entries)
      refuse("size", "1 to 8 entries of a run, 2 of a plane, 1 of a part", std::to_string(size));
    if (int64_t(count) * size != rows.dim) refuse("codewords", "of D = " + std::to_string(rows.dim) + " entries", std::to_string(count * size));
    for (const auto* part : {&place, &bits}) check("place and bits", *part, {heads, count});
    check("table", table, {heads, count});
    const Reals given = reals("values", values, false);
    const bool halves = given.type == Type::FLOAT16;
    if (halves && form != int(Form::RUNS)) refuse("values", "float32 of planes and parts", "float16");
    const bool shared = int(codes.shape(0)) == 1 && heads != 1;
    const int64_t bytes = int64_t(codes.shape(2));
    check("codes", codes, {shared ? 1 : heads, rows.count, bytes});
    if (codes.size() && (codes.stride(0) < 0 || codes.stride(1) < 0 || (bytes > 1 && codes.stride(2) != 1)))
      refuse("codes", "contiguous along the last axis, of ascending strides", "others");
    auto& own = codeword_;
    own.bits.clear(), own.place.assign(place.data(), place.data() + place.size()), span_.clear();
    tables64_.assign(table.data(), table.data() + table.size()), values_ = values;
    bool neighbours = true;
    for (int h = 0; h < heads; h++) {
      int64_t from = exact ? 0 : bytes * 8, to = exact ? 1 : 0;
      for (int i = 0; i < count; i++) {
        const int at = h * count + i, width = bits.data()[at], where = own.place[at];
        if (width < 0 || width > 8) refuse("bits", "0 to 8", std::to_string(width));
        if (where < 0 || where + width > bytes * 8) refuse("place", "within " + std::to_string(bytes) + " bytes", std::to_string(where));
        if (form == int(Form::PARTS) && (width != 8 || where % 8)) refuse("bits", "whole bytes of parts", std::to_string(width));
        const int64_t held = form == int(Form::PLANES) ? 2 * std::max(16, 1 << width) : int64_t(size) << width;
        if (tables64_[at] < 0 || tables64_[at] > int64_t(values.shape(0)) - held)
          refuse("table", "within " + std::to_string(values.shape(0)) + " values", std::to_string(tables64_[at]));
        own.bits.push_back(uint8_t(width));
        from = std::min<int64_t>(from, where), to = std::max<int64_t>(to, where + width);
        neighbours &= width > 0 && width == bits.data()[h * count] && own.place[h * count] % 8 == 0 && where == own.place[h * count] + width * i;
      }
      from = std::min(from, to) / 8, to = (to + 7) / 8;
      if (to - from > MAX_DIM) refuse("codes", "at most " + std::to_string(MAX_DIM) + " bytes of a head", std::to_string(to - from));
      span_.push_back(int32_t(from)), span_.push_back(int32_t(to - from));
    }
    if (order) {
      check("order", *order, {rows.dim});
      order_.assign(order->data(), order->data() + rows.dim);
      std::vector<bool> seen(rows.dim);
      for (int entry : order_) {
        if (entry < 0 || entry >= rows.dim || seen[entry]) refuse("order", "each entry once", std::to_string(entry));
        seen[entry] = true;
      }
    }
    if (exact) check("exact", *exact, {heads, rows.dim}), exact_ = *exact;
    codes_[0] = codes;
    own.first.clear();
    for (int h = 0; h <= heads; h++) own.first.push_back(h * count);
    const int64_t last = (codes.shape(0) - 1) * codes.stride(0) + (rows.count - 1) * codes.stride(1) + bytes;
    rows.words = {
        Form(form), codes.data(), codes.data() + (codes.size() ? last : 0), shared ? 0 : codes.stride(0), codes.stride(1), size, count,
        own.place.data(), own.bits.data(), tables64_.data(), halves ? nullptr : reinterpret_cast<const float*>(given.x),
        halves ? reinterpret_cast<const uint16_t*>(given.x) : nullptr, span_.data(), neighbours, order ? order_.data() : nullptr,
        exact ? exact->data() : nullptr};
    rows.components.first = own.first.data(), rows.type = Type::CODEWORDS;
  }

  // Signs of projections in blocks of D, and the two rotations of each block, (blocks, 2, D) of signs.
  void signs(const Bytes& codes, const F32<3>& turns, const F32<2>& hartley) {
    const int blocks = int(turns.shape(0)), odd = int(hartley.shape(0)), power = odd ? rows.dim / odd : 0;
    if (blocks < 1 || blocks > MAX_BLOCKS) refuse("turns", "of 1 to 4 blocks", std::to_string(blocks));
    check("turns", turns, {blocks, 2, rows.dim}), check("hartley", hartley, {odd, odd});
    if (odd < 1 || odd * power != rows.dim || (power & (power - 1))) refuse("hartley", "(m, m) with D = m 2^k", shape(hartley));
    codes_of(codes, 1, int64_t(blocks) * rows.dim, std::vector<float>{-1, 1});
    rows.blocks = blocks, rows.turns = turns.data(), rows.hartley = hartley.data(), rows.odd = odd, turns_ = turns, hartley_ = hartley;
    rows.type = Type::SIGNS;
  }

  // Codes of the components of each head.
  void components(const Bytes& codes, std::shared_ptr<const Quantisers> by) {
    set(rows.components, quantised_[0], "components", codes, std::move(by));
    rows.type = Type::COMPONENTS;
  }

  // Scales of the rows of values, one component for each head.
  void sizes(const Bytes& codes, std::shared_ptr<const Quantisers> by) {
    for (size_t h = 0; h < by->first.size(); h++)
      if (by->first[h] != int(h)) refuse("sizes", "one for each head", std::to_string(by->first[h]) + " before head " + std::to_string(h));
    set(rows.sizes, quantised_[1], "sizes", codes, std::move(by));
  }

  // The row of each component and then the mean of each head.
  void basis(const F32<2>& basis) {
    if (rows.type != Type::COMPONENTS && !in_parts()) refuse("basis", "that of components", "none");
    const int count = rows.components.first[rows.heads] + rows.heads, width = (rows.dim + 15) / 16 * 16;
    check("basis", basis, {count, rows.dim});
    for (int h = 0; h < rows.heads; h++)
      if (rows.components.first[h + 1] - rows.components.first[h] > rows.dim)
        refuse("components", "at most D for a head", std::to_string(rows.components.first[h + 1] - rows.components.first[h]));
    rows.basis = wide(basis_, basis, count, width);
  }

  // What a component of the keys adds to the values of each head.
  void mix(const F32<3>& mix) {
    if (rows.type != Type::COMPONENTS) refuse("mix", "that of components", "none");
    const int width = (rows.dim + 15) / 16 * 16;
    check("mix", mix, {int64_t(mix.shape(0)), rows.heads, rows.dim});
    for (int h = 0; h < rows.heads; h++)
      if (rows.components.first[h + 1] - rows.components.first[h] != rows.dim)
        refuse("components", "D for a head of values", std::to_string(rows.components.first[h + 1] - rows.components.first[h]));
    mixed_ = int(mix.shape(0)), rows.mix = wide(mix_, mix, int64_t(mixed_) * rows.heads, width);
  }

  // Components of the keys: those that values are predicted from, those that keys have.
  int predicting() const { return rows.mix ? mixed_ : rows.type == Type::COMPONENTS && rows.basis ? rows.components.first[rows.heads] : -1; }

  void check_complete() const {
    if (rows.type == Type::COMPONENTS) {
      if (!rows.basis == !rows.mix) refuse("components", "given a basis or a mix", rows.basis ? "both" : "none");
      if (rows.mix && !rows.sizes.first) refuse("components", "given sizes beside a mix", "none");
      return;
    }
    if (rows.type == Type::CODEWORDS) {
      if (in_parts() != bool(rows.basis)) refuse("basis", "that of parts", rows.basis ? "that of others" : "none");
      const bool in_runs = rows.words.form == Form::RUNS && !rows.signs;
      if (rows.mean || (rows.scale && !in_runs)) refuse("codewords", "without a mean, and with a scale in runs alone, not smoothed", "others");
      if (rows.signs && !rows.signs_head) refuse("codewords", "smoothed, or as they are", "a rotation");
      return;
    }
    if (rows.type <= Type::BFLOAT16 ? !rows.data && rows.count : !rows.stages) refuse("rows", "given their codes or floats", "none");
    if (rows.signs_head) refuse("smooth", "that of codewords", "others");
    if (rows.type == Type::SIGNS && (!rows.scale || rows.signs || rows.step)) refuse("signs", "given a scale alone, and a mean", "others");
    if (rows.signs && !rows.scale) refuse("rotation", "that of rows with a scale", "no scale");
    if (rows.mean && !rows.scale) refuse("mean", "that of rows with a scale", "no scale");
    if (rows.scale.wide && (rows.mean || rows.signs || rows.type == Type::SIGNS)) refuse("scale", "bfloat16 of rows with a rotation or a mean", "float32");
  }

  void check_span(const char* name, int from, int count) const {
    if (from < 0 || count < 0 || from > rows.count - count)
      refuse(name, "rows within " + std::to_string(rows.count), std::to_string(from) + " to " + std::to_string(int64_t(from) + count));
  }

 private:
  Floats data_;
  Bytes codes_[2];
  std::vector<float> tables_[2];
  Sides<2> scale_;
  Sides<3> step_, zero_;
  F32<2> mean_, hartley_;
  F32<1> signs_;
  struct {
    std::vector<int32_t> first, place;
    std::vector<uint8_t> bits;
  } codeword_;
  struct Quantised {
    Bytes codes;
    std::shared_ptr<const Quantisers> by;
  } quantised_[2];
  template <int N>
  struct Wide {
    F32<N> given;
    std::vector<float> padded;
  };
  Wide<2> basis_;
  Wide<3> mix_;
  std::vector<int32_t> span_, order_;
  std::vector<int64_t> tables64_;
  Values1 values_;
  F32<2> exact_, smooth_;
  F32<3> turns_;
  int mixed_ = 0;

  void codes_of(const Bytes& codes, int bits, int64_t entries, const std::optional<std::vector<float>>& table) {
    if (bits < 1 || bits > 8) refuse("bits", "1 to 8", std::to_string(bits));
    if (rows.stages == 2) refuse("codes", "given for one or two stages", "a third");
    check("codes", codes, {rows.heads, rows.count, (entries * bits + 7) / 8});
    if (codes.shape(2) > 1 && codes.stride(2) != 1) refuse("codes", "contiguous along the last axis", "stride " + std::to_string(codes.stride(2)));
    Stage& stage = rows.stage[rows.stages];
    const int64_t last = (rows.heads - 1) * codes.stride(0) + (rows.count - 1) * codes.stride(1) + int64_t(codes.shape(2));
    if (codes.size() && (codes.stride(0) < 0 || codes.stride(1) < 0)) refuse("codes", "of ascending strides", "negative ones");
    stage = {codes.data(), codes.data() + (codes.size() ? last : 0), codes.stride(0), codes.stride(1), bits, nullptr};
    if (table) {
      if (table->size() != size_t(1) << bits) refuse("table", std::to_string(1 << bits) + " values", std::to_string(table->size()));
      std::vector<float>& values = tables_[rows.stages];
      values.resize(std::max<size_t>(16, table->size()));
      for (size_t i = 0; i < values.size(); i++) values[i] = (*table)[i % table->size()];
      stage.table = values.data();
    }
    codes_[rows.stages++] = codes;
    rows.type = Type::CODES;
  }

  bool in_parts() const { return rows.type == Type::CODEWORDS && rows.words.form == Form::PARTS; }

  // Rows of D floats at steps of `width`: the given ones where they are that far apart, and so shared with all that hold them.
  template <int N>
  const float* wide(Wide<N>& own, const F32<N>& given, int64_t count, int width) const {
    const float* from = given.data();
    if (width == rows.dim && count) {
      own.given = given, own.padded.clear();
      return from;
    }
    own.padded.assign(size_t(count) * width + 1, 0);  // never without memory
    for (int64_t i = 0; i < count; i++) std::copy(from + i * rows.dim, from + (i + 1) * rows.dim, own.padded.begin() + i * width);
    return own.padded.data();
  }

  void set(Components& to, Quantised& own, const char* name, const Bytes& codes, std::shared_ptr<const Quantisers> by) {
    const int heads = int(by->first.size()) - 1;
    if (heads != rows.heads) refuse(name, "those of " + std::to_string(rows.heads) + " heads", std::to_string(heads));
    check(name, codes, {1, (rows.count + TOGETHER - 1) / TOGETHER, by->block});
    if (codes.size() && (codes.stride(2) != 1 || codes.stride(1) != by->block)) refuse(name, "contiguous", "strides");
    const uint8_t* at = codes.data();
    to = {at, at + codes.size(), by->block, by->first.data(), by->place.data(), by->bits.data(), by->table.data(), by->points.data()};
    own = {codes, std::move(by)};
  }
};

}  // namespace kvtool
