// Row passes of the language model's head: log-prob, entropy and log-sum-exp of logits, and their gradients in place.
//
// The matrix products are left to BLAS. What remains is bound by memory, so it is one pass: a block of a row is read once,
// its maximum, sum and entropy sum are taken while it is in the L1 cache, and blocks are merged as an online softmax does.
// The gradient pass runs while the row (192 KB at 49,152 entries) is in L2; exponentials are computed once and scaled.
#include "ops.h"
#include "rows.h"

#include <vector>

namespace toolr0 {
namespace {

constexpr int64_t kRowsPerThread = 1;

// The rows of `given` (kernels/toolr0_kernels/chunked.py, GIVEN), each `stride` floats after the one before.
struct Given {
  const float* at;
  int64_t stride;
  bool has_old, has_ref;
  float beta;
  float weight(int64_t i) const { return at[i]; }
  float operator()(int64_t k, int64_t i) const { return at[k * stride + i]; }
};

struct TokenLoss {
  float loss, ratio, clipped_low, clipped_high, kl, slope;  // slope: d loss / d logp
};

// -min(ratio A, clip(ratio) A) w + beta (e^d - d - 1), d = ref - logp clamped to +-20 (toolr0_core/grpo.py, token_loss).
TokenLoss token_loss(const Given& given, int64_t i, float logp) {
  TokenLoss out{};
  const float a = given(1, i), w = given(2, i), low = given(3, i), high = given(4, i);
  out.ratio = given.has_old ? std::exp(logp - given(5, i)) : 1.0f;
  const float clipped = std::min(std::max(out.ratio, low), high);
  out.loss = -std::min(out.ratio * a, clipped * a) * w;
  out.clipped_low = out.ratio < low && a < 0.0f;
  out.clipped_high = out.ratio > high && a > 0.0f;
  out.slope = out.clipped_low != 0.0f || out.clipped_high != 0.0f ? 0.0f : -a * out.ratio * w;  // NaN stays NaN
  if (given.has_ref) {
    const float raw = given(6, i) - logp, d = std::min(std::max(raw, -20.0f), 20.0f);
    out.kl = std::expm1(d) - d;
    out.loss += given.beta * out.kl;
    out.slope += std::fabs(raw) > 20.0f ? 0.0f : -given.beta * std::expm1(d);
  }
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> row_logprob(const Tensor& logits, const Tensor& target, double temperature) {
  const int64_t N = logits.size(0), V = logits.size(1);
  Tensor logp = new_floats(logits, {N}), entropy = new_floats(logits, {N}), lse = new_floats(logits, {N});
  const float* x = logits.const_data_ptr<float>();
  const int64_t* t = target.const_data_ptr<int64_t>();
  float *logp_ = logp.mutable_data_ptr<float>(), *entropy_ = entropy.mutable_data_ptr<float>(),
        *lse_ = lse.mutable_data_ptr<float>();
  const float inverse = static_cast<float>(1.0 / temperature);
  parallel_for(0, N, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* row = x + i * V;
      const Sums sums = row_sums(row, V, inverse);
      logp_[i] = sums.logp(row[t[i]], inverse);
      entropy_[i] = static_cast<float>(sums.entropy());
      lse_[i] = static_cast<float>(sums.lse(inverse));
    }
  });
  return {logp, entropy, lse};
}

// d/dx of g_logp logp + g_entropy H + g_lse lse: with p = softmax, g_logp (1[target] - p) + g_lse p - g_entropy p (ln p + H).
// The row is summed once more, since ln p has to be exact next to logits of any size: a log-sum-exp in fp32 would round it.
Tensor row_logprob_backward(const Tensor& logits, const Tensor& target, const Tensor& grad_logp, const Tensor& grad_entropy,
                            const Tensor& grad_lse, double temperature) {
  Tensor out = new_floats(logits, {logits.size(0), logits.size(1)});
  const int64_t N = logits.size(0), V = logits.size(1);
  const float* x = logits.const_data_ptr<float>();
  float* out_ = out.mutable_data_ptr<float>();
  const int64_t* t = target.const_data_ptr<int64_t>();
  const float *gl = grad_logp.const_data_ptr<float>(), *gh = grad_entropy.const_data_ptr<float>(),
              *gs = grad_lse.const_data_ptr<float>();
  const float inverse = static_cast<float>(1.0 / temperature);
  parallel_for(0, N, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* row = x + i * V;
      float* to = out_ + i * V;
      const Sums sums = row_sums(row, V, inverse);
      const float top = sums.max, log_mass = static_cast<float>(std::log(sums.mass)), h = static_cast<float>(sums.entropy());
      const float a = (gs[i] - gl[i]) * inverse, b = gh[i] * inverse;
#pragma omp simd
      for (int64_t v = 0; v < V; ++v) {
        float d = (row[v] - top) * inverse - log_mass;  // ln p
        d = d > 0.0f ? 0.0f : d;
        const float e = exp_nonpositive(d);
        to[v] = e * (a - b * ((d < kLowest ? kLowest : d) + h));
      }
      const float d = std::min((row[t[i]] - top) * inverse - log_mass, 0.0f), p = exp_nonpositive(d);
      const float entropy_term = b == 0.0f ? 0.0f : b * (std::max(d, kLowest) + h);
      to[t[i]] = -gl[i] * inverse * std::expm1(d) + p * (gs[i] * inverse - entropy_term);  // 1 - p, no cancelling
    }
  });
  return out;
}

// Results of every row [7, N] (chunked.py, RESULTS); the logits become the gradient of power * sum(weight * loss).
Tensor row_grpo_loss_(Tensor logits, const Tensor& target, const Tensor& given, const Tensor& power, bool has_old, bool has_ref,
                      double beta, double temperature) {
  const int64_t N = logits.size(0), V = logits.size(1), blocks = (V + kBlock - 1) / kBlock;
  Tensor results = new_floats(logits, {7, N});
  float *x = logits.mutable_data_ptr<float>(), *out = results.mutable_data_ptr<float>();
  const int64_t* t = target.const_data_ptr<int64_t>();
  const Given rows{given.const_data_ptr<float>(), given.stride(0), has_old, has_ref, static_cast<float>(beta)};
  const float inverse = static_cast<float>(1.0 / temperature), factor = *power.const_data_ptr<float>() * inverse;
  parallel_for(0, N, kRowsPerThread, [&](int64_t begin, int64_t end) {
    std::vector<float> tops(blocks);
    for (int64_t i = begin; i < end; ++i) {
      float* row = x + i * V;
      const float x_target = row[t[i]];
      Sums sums;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t from = b * kBlock, n = std::min(kBlock, V - from);
        const Sums s = block_sums<true>(row + from, n, inverse);
        tops[b] = s.max;
        sums.merge(s, inverse);
      }
      const float logp = sums.logp(x_target, inverse);
      const TokenLoss loss = token_loss(rows, i, logp);
      const float values[] = {loss.loss, loss.ratio, loss.clipped_low, loss.clipped_high, logp,
                              static_cast<float>(sums.entropy()), loss.kl};
      for (int64_t k = 0; k < 7; ++k) out[k * N + i] = values[k];
      const float g = rows.weight(i) * loss.slope * factor;  // d / d logit = g (1[target] - p)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t from = b * kBlock, n = std::min(kBlock, V - from);
        const float c = static_cast<float>(-g * std::exp((static_cast<double>(tops[b]) - sums.max) * inverse) / sums.mass);
#pragma omp simd
        for (int64_t v = 0; v < n; ++v) row[from + v] *= c;
      }
      row[t[i]] = -g * std::expm1(std::min(logp, 0.0f));  // 1 - p, exact for a sure model too
    }
  });
  return results;
}

}  // namespace toolr0
