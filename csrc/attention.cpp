// Attention of one new token per sequence over a paged cache of keys and values.
//
// Every live key and value is read once, for all query heads that share it (H / K of them), and that is all the memory
// traffic: 2 * length * E * 4 bytes a sequence and key head. One page is a tile: its scores, then an online softmax, then its
// values. Sequences differ in length, so threads take (sequence, key head) pairs from a common counter, and nobody waits.
#include "ops.h"
#include "rows.h"

#include <atomic>

namespace toolr0 {
namespace {

constexpr int64_t kMaxGroup = 16;  // query heads handled in one reading of the keys; more take another reading

struct Shape {
  int64_t K, B, E, M, group;
};

inline float dot(const float* a, const float* b, int64_t n) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// G query heads of one key head: q [G, E] already scaled, out [G, E].
template <int64_t E_>
void attend(const float* q, const float* k, const float* v, const int32_t* pages, int64_t length, int64_t kv_head, int64_t G,
            const Shape& s, float* scores, float* out) {
  const int64_t E = E_ ? E_ : s.E;
  float top[kMaxGroup], mass[kMaxGroup];
  std::fill(top, top + G, -kInf);
  std::fill(mass, mass + G, 0.0f);
  std::fill(out, out + G * E, 0.0f);
  for (int64_t from = 0; from < length; from += s.B) {
    const int64_t page = pages[from / s.B], n = std::min(s.B, length - from);
    const float *keys = k + (page * s.K + kv_head) * s.B * E, *values = v + (page * s.K + kv_head) * s.B * E;
    for (int64_t t = 0; t < n; ++t)
      for (int64_t g = 0; g < G; ++g) scores[g * s.B + t] = dot(q + g * E, keys + t * E, E);
    for (int64_t g = 0; g < G; ++g) {
      float* row = scores + g * s.B;
      float highest = top[g];
      for (int64_t t = 0; t < n; ++t) highest = row[t] > highest ? row[t] : highest;
      const float shift = top[g] == -kInf ? 0.0f : exp_nonpositive(top[g] - highest);
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t t = 0; t < n; ++t) {
        row[t] = exp_nonpositive(row[t] - highest);
        sum += row[t];
      }
      mass[g] = mass[g] * shift + sum;
      top[g] = highest;
      if (shift != 1.0f)
        for (int64_t e = 0; e < E; ++e) out[g * E + e] *= shift;
    }
    for (int64_t g = 0; g < G; ++g) {
      float* to = out + g * E;
      const float* row = scores + g * s.B;
      for (int64_t t = 0; t < n; ++t) {
        const float w = row[t];
#pragma omp simd
        for (int64_t e = 0; e < E; ++e) to[e] += w * values[t * E + e];
      }
    }
  }
  for (int64_t g = 0; g < G; ++g)
    for (int64_t e = 0; e < E; ++e) out[g * E + e] /= length ? mass[g] : 1.0f;
}

}  // namespace

Tensor decode_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& table,
                        const Tensor& length, double scale) {
  const int64_t S = q.size(0), H = q.size(1), E = q.size(2);
  const Shape shape{k_cache.size(1), k_cache.size(2), E, table.size(1), H / k_cache.size(1)};
  Tensor out = new_floats(q, {S, H, E});
  const float *q_ = q.const_data_ptr<float>(), *k = k_cache.const_data_ptr<float>(), *v = v_cache.const_data_ptr<float>();
  const int32_t *pages = table.const_data_ptr<int32_t>(), *lengths = length.const_data_ptr<int32_t>();
  float* out_ = out.mutable_data_ptr<float>();
  auto run = E == 64 ? attend<64> : E == 128 ? attend<128> : attend<0>;
  const int64_t tasks = S * shape.K, threads = std::max<int64_t>(1, std::min<int64_t>(tasks, torch::stable::get_num_threads()));
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    std::vector<float> scaled(kMaxGroup * E), scores(kMaxGroup * shape.B);
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t s = task / shape.K, head = task % shape.K;
      for (int64_t first = 0; first < shape.group; first += kMaxGroup) {
        const int64_t G = std::min(kMaxGroup, shape.group - first), at = (s * H + head * shape.group + first) * E;
        for (int64_t i = 0; i < G * E; ++i) scaled[i] = q_[at + i] * static_cast<float>(scale);
        run(scaled.data(), k, v, pages + s * shape.M, lengths[s], head, G, shape, scores.data(), out_ + at);
      }
    }
  });
  return out;
}

}  // namespace toolr0
