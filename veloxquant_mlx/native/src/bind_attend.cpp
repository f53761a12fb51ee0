// Attention of some sequences' queries to all that their caches hold, in one call: parts, which sequences may share, and raw tails.
//
// Parts are cut into problems, at the pages of their angles, and problems into chunks of tokens; threads take heads of chunks. What problems
// found is merged by their maxima and sums, in the order of the parts, whoever solved them.
#include <cmath>

#include "arena.hpp"
#include "bindings.hpp"
#include "stored.hpp"

namespace kvtool {
namespace {

constexpr int CHUNK = 512;  // tokens that a thread takes at a time: enough that merging their sums is nothing beside making them
constexpr int COMPONENTS = 2048;  // and of components,
constexpr int PASS = 1024;        // so many of them at a time, at most: what they are decoded to stays in a core's cache
constexpr int SHORTEST = 64;      // and at least: what is made ready for them takes as long for few
constexpr int WEIGHTS = 1 << 16;  // of queries taken together, at a time: 256 KiB
constexpr int ROWS = 64;    // queries from which on chunks are longer, so that their sums take no more memory
constexpr int MOST_ROWS = 256;  // queries of a KV head taken together: codes are decoded anew for each so many
constexpr int LONGEST = 4096;   // tokens of a problem
constexpr size_t BUDGET = 1 << 22;  // sums of problems that are solved together, in floats

// Neighbouring rows of keys and values, as a block of a cache holds them.
class Part {
 public:
  const Stored &k, &v;
  const int k_from, v_from, count, first, rope_first;
  const bool paired;

  // `first` is the position of the first row; tables are of these rows' angles, for keys before RoPE.
  Part(
      const Stored& k, const Stored& v, int k_from, int v_from, int count, int first, const std::optional<Tables>& tables, int rope_first,
      bool paired)
      : k(k), v(v), k_from(k_from), v_from(v_from), count(count), first(first), rope_first(rope_first), paired(paired), tables_(tables),
        angles_(tables_, count, rope_first, k.rows.dim) {
    check();
  }

  void check() const {
    k.check_complete(), v.check_complete();
    k.check_span("keys", k_from, count), v.check_span("values", v_from, count);
    if (v.rows.heads != k.rows.heads) refuse("values", "of " + std::to_string(k.rows.heads) + " heads", std::to_string(v.rows.heads));
    if (v.rows.mix && v.predicting() != k.predicting()) refuse("values", "predicted from the components of these keys", "others");
  }

  const Angles& angles() const { return angles_.view; }

 private:
  std::optional<Tables> tables_;
  AngleTables angles_;
};

using Shared = std::tuple<std::vector<int>, std::vector<int64_t>, std::vector<const Part*>>;
using AnyFloats = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
using Tail = std::tuple<AnyFloats, AnyFloats, std::vector<int>>;
using Mask = nb::ndarray<nb::ro, nb::ndim<4>, nb::device::cpu>;
using Out4 = nb::ndarray<nb::numpy, float, nb::ndim<4>>;

// Sequences that hold the same rows, and the column of each one's position 0.
struct Owners {
  std::vector<int> of;
  std::vector<int64_t> left;
};

// Rows of a part that one problem takes.
struct Piece {
  const Owners* owners;
  Rows keys, values;
  int k_from, v_from, count, predicting;
  int64_t position;
  const float* angles;
  int rope_first, half;
  bool paired;
};

// Rows of floats of one sequence, of all.
Rows floats_of(const char* name, const AnyFloats& x, int sequence) {
  Rows rows{};
  const auto type = x.dtype();
  const bool half = type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16;
  if (type == nb::dtype<uint16_t>()) rows.type = Type::BFLOAT16;
  else if (type == nb::dtype<float>()) rows.type = Type::FLOAT32;
  else if (half) rows.type = Type::FLOAT16;
  else refuse(name, "float32, float16 or uint16 of bfloat16", std::to_string(type.bits) + " bits");
  if (x.shape(3) > 1 && x.stride(3) != 1) refuse(name, "contiguous along D", "stride " + std::to_string(x.stride(3)));
  if (x.shape(3) < 1 || x.shape(3) > MAX_DIM) refuse(name, "of D = 1 to " + std::to_string(MAX_DIM), std::to_string(x.shape(3)));
  const int64_t size = type.bits / 8;
  rows.heads = int(x.shape(1)), rows.count = int(x.shape(2)), rows.dim = int(x.shape(3));
  rows.data = static_cast<const uint8_t*>(x.data()) + sequence * x.stride(0) * size;
  rows.head = x.stride(1) * size, rows.row = x.stride(2) * size;
  return rows;
}

// What queries see, beside all columns up to their own.
struct Sight {
  bool causal;
  int64_t window;  // columns up to and with its own, or 0
  Seen seen;
  const uint8_t* mask = nullptr;  // of the first column, or none
  int64_t sequence, head, query, column;  // strides in bytes

  Sight(bool causal, int64_t window, const std::optional<Mask>& mask, std::vector<int64_t> wanted) : causal(causal), window(window) {
    if (window < 0) refuse("window", "at least 0", std::to_string(window));
    if (!mask) return;
    const auto type = mask->dtype();
    const bool half = type.code == uint8_t(nb::dlpack::dtype_code::Float) && type.bits == 16;
    if (type == nb::dtype<uint8_t>()) seen = Seen::BOOL;
    else if (type == nb::dtype<float>()) seen = Seen::FLOAT32;
    else if (type == nb::dtype<uint16_t>()) seen = Seen::BFLOAT16;
    else if (half) seen = Seen::FLOAT16;
    else refuse("mask", "uint8 of bool, float32, float16 or uint16 of bfloat16", std::to_string(type.bits) + " bits");
    for (int i = 0; i < 4; i++)
      if (int64_t(mask->shape(i)) != wanted[i] && (i == 3 || mask->shape(i) != 1)) check("mask", *mask, wanted);
    if (wanted[3] > 1 && mask->stride(3) != 1) refuse("mask", "contiguous along the columns", "stride " + std::to_string(mask->stride(3)));
    column = type.bits / 8, this->mask = static_cast<const uint8_t*>(mask->data());
    auto stride = [&](int i) { return mask->shape(i) == 1 ? 0 : mask->stride(i) * column; };
    sequence = stride(0), head = stride(1), query = stride(2);
  }
};

class Call {
 public:
  Call(const F32<4>& q, int kv_heads, int64_t columns, const Sight& sight, Arena& arena)
      : q_(q.data()), batch_(int(q.shape(0))), heads_(kv_heads), queries_(int(q.shape(2))), dim_(int(q.shape(3))), columns_(columns),
        sight_(sight), arena_(arena) {
    if (kv_heads < 1 || q.shape(1) % kv_heads) refuse("q", "(B, H_q, Q, D) with H_q a multiple of " + std::to_string(kv_heads), shape(q));
    groups_ = int(q.shape(1)) / kv_heads;
  }

  // Parts that some sequences share.
  void add(const Shared& shared) {
    const auto& [of, left, parts] = shared;
    owners_.push_back(checked(of, left));
    for (const Part* part : parts) {
      part->check();
      const Angles& angles = part->angles();
      for (int start = 0, count; start < part->count; start += count) {
        const int at = angles.pages ? angles.first + start : 0;
        count = std::min(LONGEST, part->count - start);
        if (angles.pages) count = std::min(count, angles.each - at % angles.each);
        const float* table = angles.pages ? angles.pages[at / angles.each] + int64_t(at % angles.each) * 2 * angles.half : nullptr;
        const int predicting = part->v.rows.mix ? part->v.predicting() : 0;
        add({owners_.back().get(), part->k.rows, part->v.rows, part->k_from + start, part->v_from + start, count, predicting,
             int64_t(part->first) + start, table, part->rope_first, angles.half, part->paired});
      }
    }
  }

  // Rows as they are, (B, H, T, D), up to the last column; those of a sequence begin at its start.
  void add(const Tail& tail) {
    const auto& [keys, values, starts] = tail;
    if (int(keys.shape(0)) != batch_ || int(values.shape(0)) != batch_ || int(starts.size()) != batch_ || keys.shape(2) != values.shape(2))
      refuse("tail", "keys and values (" + std::to_string(batch_) + ", H, T, D) and as many starts", shape(keys) + " and " + shape(values));
    const int rows = int(keys.shape(2));
    for (int b = 0; b < batch_; b++) {
      const int start = starts[b];
      if (start < 0 || start > rows) refuse("starts", "0 to " + std::to_string(rows), std::to_string(start));
      owners_.push_back(checked({b}, {columns_ - rows}));
      const Rows k = floats_of("keys", keys, b), v = floats_of("values", values, b);
      for (int at = start; at < rows; at += LONGEST)
        add({owners_.back().get(), k, v, at, at, std::min(LONGEST, rows - at), 0, at, nullptr, 0, 0, false});
    }
  }

  int dim_v() const { return dim_v_; }
  int64_t rows() const { return int64_t(batch_) * heads_ * groups_ * queries_; }

  // Not yet divided by their sums: `total` of e^(score - most).
  void solve(Pool& threads, float* out, float* most, float* total) {
    std::fill(out, out + rows() * dim_v_, 0.0f);
    std::fill(most, most + rows(), -INFINITY), std::fill(total, total + rows(), 0.0f);
    size_t owners = 1;
    for (const Piece& piece : pieces_) owners = std::max(owners, piece.owners->of.size());
    const int together = std::clamp(int(MOST_ROWS / (owners * groups_)), 1, std::max(queries_, 1));
    for (int query = 0; query < queries_; query += together) {
      const int count = std::min(together, queries_ - query);
      for (size_t i = 0; i < pieces_.size();) {
        arena_.reset();
        problems_.clear(), problem_owners_.clear();
        for (size_t taken = 0; i < pieces_.size() && (problems_.empty() || taken < BUDGET); i++) taken += open(pieces_[i], query, count);
        if (!problems_.empty()) solve_open(threads, query, count, out, most, total);
      }
    }
  }

 private:
  const float* q_;
  int batch_, heads_, groups_, queries_, dim_, dim_v_ = -1;
  int64_t columns_;
  const Sight& sight_;
  Arena& arena_;
  std::vector<std::unique_ptr<Owners>> owners_;
  std::vector<Piece> pieces_;
  std::vector<Problem> problems_;
  std::vector<const Owners*> problem_owners_;

  std::unique_ptr<Owners> checked(const std::vector<int>& of, const std::vector<int64_t>& left) const {
    if (of.empty() || of.size() != left.size()) refuse("owners", "one or more, each with its column", std::to_string(of.size()));
    for (size_t i = 0; i < of.size(); i++)
      if (of[i] < (i ? of[i - 1] + 1 : 0) || of[i] >= batch_)
        refuse("owners", "ascending, below " + std::to_string(batch_), std::to_string(of[i]));
    return std::make_unique<Owners>(Owners{of, left});
  }

  void add(const Piece& piece) {
    const Rows &k = piece.keys, &v = piece.values;
    if (dim_v_ < 0) dim_v_ = v.dim;
    if (k.heads != heads_ || v.heads != heads_ || k.dim != dim_ || v.dim != dim_v_)
      refuse(
          "parts", "of (H, D, D_v) = (" + std::to_string(heads_) + ", " + std::to_string(dim_) + ", " + std::to_string(dim_v_) + ")",
          "(" + std::to_string(k.heads) + ", " + std::to_string(k.dim) + ", " + std::to_string(v.dim) + ")");
    for (int64_t left : piece.owners->left) {
      const int64_t column = left + piece.position;
      if (column < 0 || column > columns_ - piece.count)
        refuse(
            "parts", "at columns 0 to " + std::to_string(columns_), std::to_string(column) + " to " + std::to_string(column + piece.count));
    }
    pieces_.push_back(piece);
  }

  // The problem of some queries and a piece, unless they see none of it; returns the floats that its results take.
  size_t open(const Piece& piece, int query, int count) {
    const Owners& owners = *piece.owners;
    const int each = groups_ * count, rows = int(owners.of.size()) * each;
    int32_t *first = arena_.take<int32_t>(2 * rows), *stop = first + rows;
    bool any = false;
    for (int r = 0; r < rows; r++) {
      // The newest query stands at the last column.
      const int64_t at = columns_ - queries_ + query + r % count - owners.left[r / each] - piece.position, all = piece.count;
      first[r] = int32_t(sight_.window ? std::clamp(at - sight_.window + 1, int64_t(0), all) : 0);
      stop[r] = int32_t(sight_.causal ? std::clamp(at + 1, int64_t(0), all) : all);
      any |= first[r] < stop[r];
    }
    if (!any) return 0;
    Problem p{};
    p.keys = piece.keys, p.values = piece.values, p.k_from = piece.k_from, p.v_from = piece.v_from, p.count = piece.count;
    p.rows = rows, p.padded_rows = rows < 3 ? rows : (rows + 3) / 4 * 4;
    p.dim = (dim_ + 15) / 16 * 16, p.dim_v = (dim_v_ + 15) / 16 * 16;
    p.first = first, p.stop = stop, p.q = asked(owners, query, count);
    if (sight_.mask) p.seen = sight_.seen, p.mask = seen_by(piece, query, count);
    p.angles = piece.angles, p.rope_first = piece.rope_first, p.half = piece.half, p.paired = piece.paired;
    // Components are those of all heads, and what is made ready for a span of them is worth more of it.
    const int most = piece.predicting ? COMPONENTS : CHUNK;
    if (piece.predicting) p.span = std::clamp(WEIGHTS / (heads_ * rows) / TILE * TILE, SHORTEST, PASS);
    else p.span = std::clamp(WEIGHTS / rows / TILE * TILE, TILE, most);
    p.chunk = most * std::max(1, rows / ROWS) / p.span * p.span, p.chunks = (p.count + p.chunk - 1) / p.chunk;
    const size_t all = size_t(heads_) * p.padded_rows, sums = all * p.chunks * p.dim_v;
    p.turned = arena_.take<float>(all * p.dim), p.by_mean = arena_.take<float>(all);
    p.sums = arena_.take<float>(sums), p.states = arena_.take<float>(all * p.chunks * 3);
    const size_t shared = size_t(p.chunks) * heads_ * rows * ((piece.predicting + 15) / 16 * 16);
    p.shared = arena_.take<float>(shared);
    problems_.push_back(p), problem_owners_.push_back(&owners);
    return all * p.dim + sums + shared;
  }

  // Queries of some sequences, (H, sequences x G x count, D).
  const float* asked(const Owners& owners, int query, int count) {
    if (!problems_.empty() && problem_owners_.back()->of == owners.of) return problems_.back().q;
    float *to = arena_.take<float>(size_t(heads_) * owners.of.size() * groups_ * count * dim_), *all = to;
    for (int h = 0; h < heads_; h++)
      for (int b : owners.of)
        for (int g = 0; g < groups_; g++, to += int64_t(count) * dim_)
          std::copy_n(q_ + (head_of(b, h, g) + query) * dim_, int64_t(count) * dim_, to);
    return all;
  }

  // Where the mask of each of these queries begins, (H, sequences x G x count).
  const uint8_t* const* seen_by(const Piece& piece, int query, int count) {
    const Owners& owners = *piece.owners;
    const uint8_t **to = arena_.take<const uint8_t*>(size_t(heads_) * owners.of.size() * groups_ * count), **all = to;
    for (int h = 0; h < heads_; h++)
      for (size_t o = 0; o < owners.of.size(); o++)
        for (int g = 0; g < groups_; g++)
          for (int i = 0; i < count; i++)
            *to++ = sight_.mask + owners.of[o] * sight_.sequence + (int64_t(h) * groups_ + g) * sight_.head + (query + i) * sight_.query +
                    (owners.left[o] + piece.position) * sight_.column;
    return all;
  }

  // Index of a query head's first query.
  int64_t head_of(int sequence, int head, int group) const { return ((int64_t(sequence) * heads_ + head) * groups_ + group) * queries_; }

  void solve_open(Pool& threads, int query, int count, float* out, float* most, float* total) {
    const Level& now = level();
    struct Item {
      const Problem* problem;
      int chunk, head;
    };
    std::vector<Item> items;
    std::vector<std::vector<Found>> found(batch_);
    size_t scratch = 0;
    int64_t pieces = 0;
    for (const Problem& p : problems_) pieces += p.chunks;
    // Heads of one chunk share its angles; there must be pieces enough for all threads.
    const int together = int(std::clamp<int64_t>(heads_ * pieces / (4 * threads.threads()), 1, heads_));
    for (size_t i = 0; i < problems_.size(); i++) {
      Problem& p = problems_[i];
      p.ahead = p.chunk * std::max(1, threads.threads() / ((heads_ + together - 1) / together));
      scratch = std::max(scratch, p.values.mix ? now.attend_components_scratch(p) : now.attend_scratch(p));
      for (int chunk = 0; chunk < p.chunks; chunk++)
        for (int head = 0; head < (p.values.mix ? 1 : heads_); head += together) items.push_back({&p, chunk, head});
      const Owners& owners = *problem_owners_[i];
      for (size_t o = 0; o < owners.of.size(); o++) found[owners.of[o]].push_back({&p, int(o) * groups_ * count});
    }
    scratch = (scratch + 15) / 16 * 16;
    float* scratches = arena_.take<float>(scratch * threads.threads());
    threads.run(int(problems_.size()), [&](int i, int) {
      for (int head = 0; head < heads_; head++) now.prepare(problems_[i], head);
    });
    threads.run(int(items.size()), [&](int i, int thread) {
      const Item& item = items[i];
      float* own = scratches + scratch * thread;
      if (item.problem->values.mix) now.attend_components(*item.problem, item.chunk, own);
      else now.attend(*item.problem, item.head, std::min(item.head + together, heads_), item.chunk, own);
    });
    threads.run(batch_ * heads_, [&](int i, int) {
      const int sequence = i / heads_;
      if (found[sequence].empty()) return;
      const int64_t first = head_of(sequence, 0, 0) + query;
      const Merging m{found[sequence].data(), int(found[sequence].size()), groups_, count, first, queries_, out, most, total};
      now.merge(m, i % heads_);
    });
  }
};

std::pair<Out4, nb::ndarray<nb::numpy, float, nb::ndim<3>>> attend(
    const F32<4>& q,
    int kv_heads,
    const std::vector<Shared>& parts,
    const std::optional<Tail>& tail,
    int64_t columns,
    bool causal,
    int64_t window,
    const std::optional<Mask>& mask,
    const std::optional<F32<1>>& sinks) {
  static thread_local Arena arena;
  const size_t batch = q.shape(0), heads = q.shape(1), queries = q.shape(2);
  const Sight sight(causal, window, mask, {int64_t(batch), int64_t(heads), int64_t(queries), columns});
  if (sinks) check("sinks", *sinks, {int64_t(heads)});
  Call call(q, kv_heads, columns, sight, arena);
  for (const Shared& shared : parts) call.add(shared);
  if (tail) call.add(*tail);
  if (call.dim_v() < 0) refuse("parts", "one or more", "none");
  const int64_t rows = call.rows(), dim = call.dim_v();
  float *out = new float[std::max<int64_t>(rows * dim, 1)], *lse = new float[std::max<int64_t>(rows, 1)];
  Out4 out_array = owned<Out4>(out, {batch, heads, queries, size_t(dim)});
  Out3 lse_array = owned<Out3>(lse, {batch, heads, queries});
  const std::shared_ptr<Pool> threads = the_pool();
  std::vector<float> total(rows);
  const WithoutGil free;
  call.solve(*threads, out, lse, total.data());
  arena.shrink();
  for (int64_t row = 0; row < rows; row++) {
    // A learned sink is one more score, of a value of zeros.
    const float sink = sinks ? sinks->data()[row / queries % heads] : -INFINITY, most = std::max(lse[row], sink);
    const float fade = lse[row] == most ? 1 : std::exp(lse[row] - most), sum = total[row] * fade + (sinks ? std::exp(sink - most) : 0);
    const float over = sum == 0 ? 0 : fade / sum;
    for (int64_t i = 0; i < dim; i++) out[row * dim + i] *= over;
    lse[row] = sum == 0 ? -INFINITY : most + std::log(sum);
  }
  return {out_array, lse_array};
}

Out3 decode(const Stored& stored, int from, int count) {
  stored.check_complete(), stored.check_span("rows", from, count);
  if (stored.rows.mix) refuse("rows", "rows by themselves", "values predicted from keys");
  const Rows& rows = stored.rows;
  float* out = new float[std::max<size_t>(size_t(rows.heads) * count * rows.dim, 1)];
  Out3 array = owned<Out3>(out, {size_t(rows.heads), size_t(count), size_t(rows.dim)});
  const Level& now = level();
  const std::shared_ptr<Pool> threads = the_pool();
  const int chunk = CHUNK, chunks = (count + chunk - 1) / chunk;
  const WithoutGil free;
  threads->run(rows.heads * chunks, [&](int i, int) {
    const int head = i / chunks, start = i % chunks * chunk;
    now.decode(rows, head, from + start, std::min(chunk, count - start), out + (int64_t(head) * count + start) * rows.dim);
  });
  return array;
}

}  // namespace

void bind_attend(nb::module_& m) {
  nb::class_<Quantisers>(m, "Quantisers").def(nb::init<const Bounds&, const Words<1>&, const F32<1>&>());
  nb::class_<Stored>(m, "Stored")
      .def(nb::init<int, int, int>())
      .def("floats", &Stored::floats)
      .def("codes", &Stored::codes, nb::arg("codes"), nb::arg("bits"), nb::arg("table").none())
      .def("scale", &Stored::scale)
      .def("mean", &Stored::mean)
      .def("affine", &Stored::affine)
      .def("rotation", &Stored::rotation)
      .def("smooth", &Stored::smooth)
      .def("codewords", &Stored::codewords, nb::arg("form"), nb::arg("codes"), nb::arg("size"), nb::arg("place"), nb::arg("bits"),
           nb::arg("table"), nb::arg("values"), nb::arg("order").none(), nb::arg("exact").none())
      .def("signs", &Stored::signs)
      .def("components", &Stored::components)
      .def("sizes", &Stored::sizes)
      .def("basis", &Stored::basis)
      .def("mix", &Stored::mix);
  nb::class_<Part>(m, "Part")
      .def(nb::init<const Stored&, const Stored&, int, int, int, int, const std::optional<Tables>&, int, bool>(), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::arg("k"), nb::arg("v"), nb::arg("k_from"), nb::arg("v_from"), nb::arg("count"), nb::arg("first"),
           nb::arg("angles").none(), nb::arg("rope_first"), nb::arg("paired"));
  m.attr("MOST_ROWS") = MOST_ROWS;
  m.def("attend", &attend, nb::arg("q"), nb::arg("kv_heads"), nb::arg("parts"), nb::arg("tail").none(), nb::arg("columns"), nb::arg("causal"),
        nb::arg("window"), nb::arg("mask").none(), nb::arg("sinks").none());
  m.def("decode", &decode);
}

}  // namespace kvtool
