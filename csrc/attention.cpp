// Attention of one new token per sequence over a paged cache of keys and values.
//
// Every live key and value is read once, for all query heads that share it (H / K of them), and that is all the memory
// traffic: 2 * length * E * 4 bytes a sequence and key head. One page is a tile: its scores, then an online softmax, then its
// values. Sequences differ in length, so threads take (sequence, key head) pairs from a common counter, and nobody waits.
#include "ops.h"
#include "rows.h"
#include "vec.h"

#include <array>
#include <atomic>
#include <utility>

namespace toolr0 {
namespace {

constexpr int64_t kMaxGroup = 8;  // query heads handled in one reading of the keys; more take another reading
constexpr int64_t kKeys = 4;  // scored together

struct Shape {
  int64_t K, B, E, group;
};

// Asks for E floats. A hardware prefetcher stops where a page of memory ends, and those of the cache are not much larger.
template <int64_t E>
inline void prefetch(const float* at) {
  for (int64_t e = 0; e < E; e += kLanes) __builtin_prefetch(at + e);
}

// Scores of n keys for G queries: scores[g][t] = q[g] . keys[t], every key loaded once. `next` is what will be read after.
template <int64_t E, int64_t G>
inline void score(const float* q, const float* keys, int64_t n, int64_t B, const float* next, float* scores) {
  Vec queries[G][E / kLanes];
  for (int64_t g = 0; g < G; ++g)
    for (int64_t j = 0; j < E / kLanes; ++j) queries[g][j] = load(q + g * E + j * kLanes);
  for (int64_t t = 0; t < n; t += kKeys) {
    Vec sum[G][kKeys] = {};
    const int64_t here = std::min(kKeys, n - t);
    for (int64_t i = 0; i < here; ++i) {
      prefetch<E>(next + (t + i) * E);
      for (int64_t j = 0; j < E / kLanes; ++j) {
        const Vec key = load(keys + (t + i) * E + j * kLanes);
        for (int64_t g = 0; g < G; ++g) sum[g][i] += queries[g][j] * key;
      }
    }
    for (int64_t g = 0; g < G; ++g) {
      const Quarter four = totals(sum[g]);
      std::memcpy(scores + g * B + t, &four, here * sizeof(float));
    }
  }
}

// out[g] = shift[g] * out[g] + sum over t of weights[g][t] * values[t], every value loaded once.
template <int64_t E, int64_t G>
inline void accumulate(const float* weights, const float* values, int64_t n, int64_t B, const float* shift, const float* next,
                       float* out) {
  Vec sum[G][E / kLanes];
  for (int64_t g = 0; g < G; ++g)
    for (int64_t j = 0; j < E / kLanes; ++j) sum[g][j] = shift[g] * load(out + g * E + j * kLanes);
  for (int64_t t = 0; t < n; ++t) {
    prefetch<E>(next + t * E);
    for (int64_t j = 0; j < E / kLanes; ++j) {
      const Vec value = load(values + t * E + j * kLanes);
      for (int64_t g = 0; g < G; ++g) sum[g][j] += weights[g * B + t] * value;
    }
  }
  for (int64_t g = 0; g < G; ++g) std::memcpy(out + g * E, sum[g], sizeof sum[g]);
}

// The scores of a page become weights relative to the largest score so far; the factor for what was summed before.
inline float soften(float* row, int64_t n, float& top, float& mass) {
  float highest = top;
  for (int64_t t = 0; t < n; ++t) highest = row[t] > highest ? row[t] : highest;
  const float shift = top == -kInf ? 0.0f : exp_nonpositive(top - highest);
  const float base = highest == -kInf ? 0.0f : highest;  // nothing but -inf so far: weights of 0, not NaN
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t t = 0; t < n; ++t) {
    row[t] = exp_nonpositive(row[t] - base);
    sum += row[t];
  }
  mass = mass * shift + sum;
  top = highest;
  return shift;
}

// G queries of one key head over its sequence's pages: q [G, E] already scaled, out [G, E].
template <int64_t E, int64_t G>
void attend(const float* q, const float* k, const float* v, const int32_t* pages, int64_t length, int64_t head, const Shape& s,
            float* scores, float* out) {
  float top[G], mass[G] = {}, shift[G];
  std::fill(top, top + G, -kInf);
  std::fill(out, out + G * E, 0.0f);
  for (int64_t from = 0; from < length; from += s.B) {
    const int64_t page = from / s.B, following = std::min(page + 1, (length - 1) / s.B), n = std::min(s.B, length - from);
    const int64_t at = (pages[page] * s.K + head) * s.B * E, then = (pages[following] * s.K + head) * s.B * E;
    score<E, G>(q, k + at, n, s.B, v + at, scores);
    for (int64_t g = 0; g < G; ++g) shift[g] = soften(scores + g * s.B, n, top[g], mass[g]);
    accumulate<E, G>(scores, v + at, n, s.B, shift, k + then, out);
  }
  for (int64_t g = 0; g < G; ++g)
    for (int64_t e = 0; e < E; ++e) out[g * E + e] /= length ? mass[g] : 1.0f;
}

using Attend = void (*)(const float*, const float*, const float*, const int32_t*, int64_t, int64_t, const Shape&, float*,
                        float*);

// attend for 1 to kMaxGroup queries of a fixed head size.
template <int64_t E, size_t... I>
std::array<Attend, sizeof...(I)> family(std::index_sequence<I...>) {
  return {attend<E, I + 1>...};
}

}  // namespace

Tensor decode_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& table,
                        const Tensor& length, double scale) {
  const int64_t S = q.size(0), H = q.size(1), E = q.size(2), M = table.size(1);
  const Shape shape{k_cache.size(1), k_cache.size(2), E, H / k_cache.size(1)};
  STD_TORCH_CHECK(E == 32 || E == 64 || E == 96 || E == 128, "head size has to be 32, 64, 96 or 128");
  constexpr auto groups = std::make_index_sequence<kMaxGroup>{};
  const auto run = E == 32   ? family<32>(groups)
                   : E == 64 ? family<64>(groups)
                   : E == 96 ? family<96>(groups)
                             : family<128>(groups);
  Tensor out = new_floats(q, {S, H, E});
  const float *q_ = q.const_data_ptr<float>(), *k = k_cache.const_data_ptr<float>(), *v = v_cache.const_data_ptr<float>();
  const int32_t *pages = table.const_data_ptr<int32_t>(), *lengths = length.const_data_ptr<int32_t>();
  for (int64_t s = 0; s < S; ++s) {
    STD_TORCH_CHECK(lengths[s] >= 0 && lengths[s] <= M * shape.B, "no such length");
    for (int64_t m = 0; m * shape.B < lengths[s]; ++m)
      STD_TORCH_CHECK(pages[s * M + m] >= 0 && pages[s * M + m] < k_cache.size(0), "no such page");
  }
  float* out_ = out.mutable_data_ptr<float>();
  const int64_t tasks = S * shape.K, threads = std::max<int64_t>(1, std::min<int64_t>(tasks, torch::stable::get_num_threads()));
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    std::vector<float> scaled(kMaxGroup * E), scores(kMaxGroup * shape.B);
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t s = task / shape.K, head = task % shape.K;
      for (int64_t first = 0; first < shape.group; first += kMaxGroup) {
        const int64_t G = std::min(kMaxGroup, shape.group - first), at = (s * H + head * shape.group + first) * E;
        for (int64_t i = 0; i < G * E; ++i) scaled[i] = q_[at + i] * static_cast<float>(scale);
        run[G - 1](scaled.data(), k, v, pages + s * M, lengths[s], head, shape, scores.data(), out_ + at);
      }
    }
  });
  return out;
}

}  // namespace toolr0
