// The decoder's small operations, forward only: norms, rotary embeddings, SwiGLU, and new keys and values into their pages.
//
// A decoding step has few tokens, so what these cost is calls and passes over memory: plain torch makes five of each for a norm
// and eight for a rotation. Here every one is a single pass. Inputs are contiguous.
#include "ops.h"
#include "rows.h"

namespace toolr0 {
namespace {

constexpr int64_t kGrain = 1 << 15;  // numbers that are worth a thread of their own

// f(first row, last row) over N rows of D numbers, on as many threads as they are worth.
template <class F>
void over_rows(int64_t N, int64_t D, F&& f) {
  parallel_for(0, N, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, D)), f);
}

void normalise(const float* x, const float* weight, int64_t D, float eps, float* out) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < D; ++d) sum += x[d] * x[d];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(D) + eps);
#pragma omp simd
  for (int64_t d = 0; d < D; ++d) out[d] = weight[d] * (x[d] * scale);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t N = x.size(0), D = x.size(1);
  Tensor out = new_floats(x, {N, D});
  const float *x_ = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* out_ = out.mutable_data_ptr<float>();
  over_rows(N, D, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) normalise(x_ + n * D, w, D, static_cast<float>(eps), out_ + n * D);
  });
  return out;
}

// (rms_norm(x + residual), x + residual)
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  const int64_t N = x.size(0), D = x.size(1);
  Tensor out = new_floats(x, {N, D}), total = new_floats(x, {N, D});
  const float *x_ = x.const_data_ptr<float>(), *r = residual.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float *out_ = out.mutable_data_ptr<float>(), *total_ = total.mutable_data_ptr<float>();
  over_rows(N, D, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      float* row = total_ + n * D;
#pragma omp simd
      for (int64_t d = 0; d < D; ++d) row[d] = x_[n * D + d] + r[n * D + d];
      normalise(row, w, D, static_cast<float>(eps), out_ + n * D);
    }
  });
  return {out, total};
}

// Pairs (i, i + F) of every head of queries [N, H, 2F] and keys [N, K, 2F], by the angles of their token [N, F].
std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  const int64_t N = q.size(0), H = q.size(1), K = k.size(1), F = cos.size(1);
  Tensor turned_q = new_floats(q, {N, H, 2 * F}), turned_k = new_floats(q, {N, K, 2 * F});
  const float *q_ = q.const_data_ptr<float>(), *k_ = k.const_data_ptr<float>(), *c = cos.const_data_ptr<float>(),
              *s = sin.const_data_ptr<float>();
  float *tq = turned_q.mutable_data_ptr<float>(), *tk = turned_k.mutable_data_ptr<float>();
  const auto turn = [F](const float* from, int64_t heads, const float* c, const float* s, float* to) {
    for (int64_t at = 0; at < heads * 2 * F; at += 2 * F) {
#pragma omp simd
      for (int64_t i = 0; i < F; ++i) {
        const float a = from[at + i], b = from[at + F + i];
        to[at + i] = a * c[i] - b * s[i];
        to[at + F + i] = b * c[i] + a * s[i];
      }
    }
  };
  over_rows(N, (H + K) * 2 * F, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      turn(q_ + n * H * 2 * F, H, c + n * F, s + n * F, tq + n * H * 2 * F);
      turn(k_ + n * K * 2 * F, K, c + n * F, s + n * F, tk + n * K * 2 * F);
    }
  });
  return {turned_q, turned_k};
}

// silu(gate) * up
Tensor swiglu(const Tensor& gate, const Tensor& up) {
  const int64_t count = gate.numel();
  Tensor out = new_floats(gate, {count});
  const float *g = gate.const_data_ptr<float>(), *u = up.const_data_ptr<float>();
  float* out_ = out.mutable_data_ptr<float>();
  over_rows(count, 1, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float decay = exp_nonpositive(-std::fabs(g[i]));  // sigmoid without overflow: 1 / (1 + e^-|g|), or e^g of that
      out_[i] = g[i] * ((g[i] >= 0.0f ? 1.0f : decay) / (1.0f + decay)) * u[i];
    }
  });
  return out;
}

// Row s of keys and values [S, K, E] to place `offset` of page `page` in caches [P, K, B, E].
void write_kv_(const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache, const Tensor& page, const Tensor& offset) {
  const int64_t S = k.size(0), K = k.size(1), E = k.size(2), B = k_cache.size(2);
  const float *k_ = k.const_data_ptr<float>(), *v_ = v.const_data_ptr<float>();
  const int64_t *pages = page.const_data_ptr<int64_t>(), *offsets = offset.const_data_ptr<int64_t>();
  for (int64_t s = 0; s < S; ++s)
    STD_TORCH_CHECK(pages[s] >= 0 && pages[s] < k_cache.size(0) && offsets[s] >= 0 && offsets[s] < B, "no such place in the cache");
  float *to_k = k_cache.mutable_data_ptr<float>(), *to_v = v_cache.mutable_data_ptr<float>();
  over_rows(S, 2 * K * E, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      for (int64_t h = 0; h < K; ++h) {
        const int64_t to = ((pages[s] * K + h) * B + offsets[s]) * E, from = (s * K + h) * E;
        std::memcpy(to_k + to, k_ + from, E * sizeof(float));
        std::memcpy(to_v + to, v_ + from, E * sizeof(float));
      }
    }
  });
}

}  // namespace toolr0
