// x @ weight.T for few rows of x: what a decoding step spends its time on.
//
// BLAS is made for large matrices; with 8 to 64 rows it reaches a quarter to two thirds of its speed. Here four rows of the
// weight are read once and meet all rows of x while they are in the nearest cache; a tile of six by four running sums, 16 lanes
// each, stays in registers, and lanes are added at the end only. A sum's order does not depend on how many rows there are, so
// that a row of x gives the same numbers to the last bit in any batch.
#include "ops.h"
#include "rows.h"
#include "vec.h"

namespace toolr0 {
namespace {

constexpr int64_t kWeights = 4;  // rows of the weight in a tile
#ifdef __AVX512F__
constexpr int64_t kRows = 6;  // rows of x: 24 sums of the 32 registers
#else
constexpr int64_t kRows = 2;  // registers hold 8 lanes or 4, and there are 16
#endif

inline Vec load_some(const float* from, int64_t n) {
  Vec v = {};
  std::memcpy(&v, from, n * sizeof(float));
  return v;
}

// y[m][0..n) for R rows of x and n <= 4 rows of the weight; asks for the four rows after them, where `ahead`.
template <int64_t R>
void tile(const float* x, const float* weight, const float* bias, int64_t K, int64_t n, bool ahead, float* y, int64_t stride) {
  Vec sum[R][kWeights] = {};
  const float* w[kWeights];
  for (int64_t i = 0; i < kWeights; ++i) w[i] = weight + std::min(i, n - 1) * K;
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes) {
    Vec part[kWeights];
    for (int64_t i = 0; i < kWeights; ++i) {
      part[i] = load(w[i] + k);
      if (ahead) __builtin_prefetch(w[i] + kWeights * K + k);
    }
    for (int64_t r = 0; r < R; ++r) {
      const Vec row = load(x + r * K + k);
      for (int64_t i = 0; i < kWeights; ++i) sum[r][i] += row * part[i];
    }
  }
  if (k < K) {
    for (int64_t r = 0; r < R; ++r) {
      const Vec row = load_some(x + r * K + k, K - k);
      for (int64_t i = 0; i < kWeights; ++i) sum[r][i] += row * load_some(w[i] + k, K - k);
    }
  }
  for (int64_t r = 0; r < R; ++r) {
    Quarter four = totals(sum[r]);
    for (int64_t i = 0; bias && i < n; ++i) four[i] += bias[i];
    std::memcpy(y + r * stride, &four, n * sizeof(float));
  }
}

using Tile = void (*)(const float*, const float*, const float*, int64_t, int64_t, bool, float*, int64_t);

template <size_t... I>
constexpr std::array<Tile, sizeof...(I)> tiles(std::index_sequence<I...>) {
  return {tile<I + 1>...};
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t M = x.size(0), K = x.size(1), N = weight.size(0);
  Tensor out = new_floats(x, {M, N});
  const float *x_ = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>(),
              *b = bias ? bias->const_data_ptr<float>() : nullptr;
  float* out_ = out.mutable_data_ptr<float>();
  static constexpr auto run = tiles(std::make_index_sequence<kRows>{});
  const int64_t blocks = (N + kWeights - 1) / kWeights;
  parallel_for(0, M ? blocks : 0, std::max<int64_t>(1, (1 << 16) / (M * K * kWeights + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t at = block * kWeights, n = std::min(kWeights, N - at);
      for (int64_t m = 0; m < M; m += kRows) {
        const bool ahead = m == 0 && at + 2 * kWeights <= N;
        run[std::min(kRows, M - m) - 1](x_ + m * K, w + at * K, b ? b + at : nullptr, K, n, ahead, out_ + m * N + at, N);
      }
    }
  });
  return out;
}

}  // namespace toolr0
