// Sums over tokens of w y~ for the queries of all heads, which are in the lanes: none need be added across them.
#pragma once
#include "components.hpp"
#include "problem.hpp"
#include "products.hpp"
#include "simd.hpp"
#include "words.hpp"

namespace kvtool {
namespace KVTOOL_INSIDE {
namespace {

constexpr int AT_A_TIME = W == 16 ? 8 : W == 8 ? 6 : 4;  // components
constexpr int RUN = 64;  // tokens whose products are added up one after another: the longer the sum, the more it loses
constexpr int FEW = W == 16 ? 256 : 128;  // tokens of AT_A_TIME components: with the weights they are in the nearest cache

inline size_t shared_scratch(int lanes) { return FEW * lanes + AT_A_TIME * (FEW + 2 * TOGETHER); }

// sums[i][q] += sum over tokens of y[i][t] w[t][q]: AT_A_TIME components, NV vectors of queries; rows of w and sums have `lanes` floats.
template <int NV>
void add_outer(Matrix y, const float* w, int64_t lanes, int count, float* sums) {
  V x[AT_A_TIME][NV] = {};
  for (int t = 0; t < count; t++) {
    V weight[NV];
    for (int n = 0; n < NV; n++) weight[n] = load(w + t * lanes + n * W);
    for (int i = 0; i < AT_A_TIME; i++)
      for (int n = 0; n < NV; n++) x[i][n] += weight[n] * y.at[i * y.row + t];
  }
  for (int i = 0; i < AT_A_TIME; i++)
    for (int n = 0; n < NV; n++) store(sums + i * lanes + n * W, load(sums + i * lanes + n * W) + x[i][n]);
}

// At most FEW tokens; `weights` of all heads end at `end`.
void add_shared(const Problem& p, int token, int count, const float* weights, const float* end, float* scratch, float* sums) {
  const Components& c = p.keys.components;
  const int every = c.first[p.keys.heads], from = p.k_from + token, width = padded(count), queries = p.keys.heads * p.rows;
  const int lanes = padded(queries);
  float *turned = scratch, *y = turned + FEW * lanes;
  constexpr int ROW = FEW + 2 * TOGETHER;
  auto bytes_of = [](const float* x) { return reinterpret_cast<const uint8_t*>(x); };
  turn_rows(bytes_of(weights), bytes_of(end), 4 * p.span, 4 * width, queries, reinterpret_cast<uint32_t*>(turned), lanes);
  for (int i = 0; i < every; i += AT_A_TIME) {
    decode_components(c, i, i + AT_A_TIME < every ? i + AT_A_TIME : every, from, count, y, ROW);
    const Matrix of{y + from % TOGETHER, ROW};
    for (int q = 0; q < lanes; q += 2 * W)
      for (int t = 0; t < count; t += RUN) {
        const Matrix own{of.at + t, ROW};
        const int some = count - t < RUN ? count - t : RUN;
        float* to = sums + int64_t(i) * lanes + q;
        if (q + W < lanes) add_outer<2>(own, turned + t * lanes + q, lanes, some, to);
        else add_outer<1>(own, turned + t * lanes + q, lanes, some, to);
      }
  }
}

}  // namespace
}  // namespace KVTOOL_INSIDE
}  // namespace kvtool
