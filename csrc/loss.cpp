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

// What a token's loss and its derivative need; optional inputs are null.
struct Policy {
  const float *advantage, *weight, *old_logp, *ref_logp, *importance, *low, *high;
  float beta;
};

struct TokenLoss {
  float loss, ratio, clipped_low, clipped_high, kl, slope;  // slope: d loss / d logp
};

// -min(ratio A, clip(ratio) A) w + beta (e^d - d - 1), d = ref - logp clamped to +-20 (toolr0_core/grpo.py, token_loss).
TokenLoss token_loss(const Policy& p, int64_t i, float logp) {
  TokenLoss out{};
  const float a = p.advantage[i], low = 1.0f - p.low[i], high = 1.0f + p.high[i];
  const float w = p.importance ? p.importance[i] : 1.0f;
  out.ratio = p.old_logp ? std::exp(logp - p.old_logp[i]) : 1.0f;
  const float clipped = std::min(std::max(out.ratio, low), high);
  const bool inside = out.ratio * a < clipped * a || clipped == out.ratio;
  out.loss = -std::min(out.ratio * a, clipped * a) * w;
  out.slope = inside ? -a * out.ratio * w : 0.0f;
  out.clipped_low = out.ratio < low && a < 0.0f;
  out.clipped_high = out.ratio > high && a > 0.0f;
  if (p.ref_logp) {
    const float raw = p.ref_logp[i] - logp;
    const float d = std::min(std::max(raw, -20.0f), 20.0f);
    out.kl = std::expm1(d) - d;
    out.loss += p.beta * out.kl;
    out.slope += std::fabs(raw) <= 20.0f ? -p.beta * std::expm1(d) : 0.0f;
  }
  return out;
}

const float* floats(const std::optional<Tensor>& t) { return t ? t->const_data_ptr<float>() : nullptr; }

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
      float* row = const_cast<float*>(x) + i * V;  // block_sums<false> does not write
      Sums sums;
      for (int64_t b = 0; b < V; b += kBlock)
        sums.merge(block_sums<false>(row + b, std::min(kBlock, V - b), inverse), inverse);
      logp_[i] = sums.logp(row[t[i]], inverse);
      entropy_[i] = static_cast<float>(sums.entropy());
      lse_[i] = static_cast<float>(sums.lse(inverse));
    }
  });
  return {logp, entropy, lse};
}

// d/dx of g_logp logp + g_entropy H + g_lse lse: with p = softmax, g_logp (1[target] - p) + g_lse p - g_entropy p (ln p + H).
Tensor row_logprob_backward(const Tensor& logits, const Tensor& target, const Tensor& lse, const Tensor& entropy,
                            const Tensor& grad_logp, const Tensor& grad_entropy, const Tensor& grad_lse, double temperature) {
  Tensor out = new_floats(logits, {logits.size(0), logits.size(1)});
  const int64_t N = logits.size(0), V = logits.size(1);
  const float* x = logits.const_data_ptr<float>();
  float* out_ = out.mutable_data_ptr<float>();
  const int64_t* t = target.const_data_ptr<int64_t>();
  const float *lse_ = lse.const_data_ptr<float>(), *h_ = entropy.const_data_ptr<float>(),
              *gl = grad_logp.const_data_ptr<float>(), *gh = grad_entropy.const_data_ptr<float>(),
              *gs = grad_lse.const_data_ptr<float>();
  const float inverse = static_cast<float>(1.0 / temperature);
  parallel_for(0, N, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float *row = x + i * V, l = lse_[i], h = h_[i], a = (gs[i] - gl[i]) * inverse, b = gh[i] * inverse;
      float* to = out_ + i * V;
#pragma omp simd
      for (int64_t v = 0; v < V; ++v) {
        float d = row[v] * inverse - l;  // ln p
        d = d > 0.0f ? 0.0f : d;
        const float e = exp_nonpositive(d);
        to[v] = e * (a - b * ((d < kLowest ? kLowest : d) + h));
      }
      const float d = row[t[i]] * inverse - l, p = exp_nonpositive(d > 0.0f ? 0.0f : d);
      to[t[i]] = -gl[i] * inverse * std::expm1(std::min(d, 0.0f)) + p * (gs[i] * inverse - b * (d + h));  // 1 - p, no cancelling
    }
  });
  return out;
}

// Loss and statistics of every row [8, N]: loss, ratio, clipped_low, clipped_high, kl, logp, entropy, lse; the logits become
// the gradient of sum(weight * loss), exact zeros where the weight is 0. With grad false they are only read.
Tensor row_grpo_loss_(Tensor logits, const Tensor& target, const Tensor& advantage, const Tensor& weight,
                      const std::optional<Tensor>& old_logp, const std::optional<Tensor>& ref_logp,
                      const std::optional<Tensor>& importance, const Tensor& clip_low, const Tensor& clip_high, double beta,
                      double temperature, bool grad) {
  const int64_t N = logits.size(0), V = logits.size(1);
  Tensor stats = new_floats(logits, {8, N});
  float *x = logits.mutable_data_ptr<float>(), *out = stats.mutable_data_ptr<float>();
  const int64_t* t = target.const_data_ptr<int64_t>();
  const Policy policy{advantage.const_data_ptr<float>(), weight.const_data_ptr<float>(), floats(old_logp), floats(ref_logp),
                      floats(importance), clip_low.const_data_ptr<float>(), clip_high.const_data_ptr<float>(),
                      static_cast<float>(beta)};
  const float inverse = static_cast<float>(1.0 / temperature);
  const int64_t blocks = (V + kBlock - 1) / kBlock;
  parallel_for(0, N, kRowsPerThread, [&](int64_t begin, int64_t end) {
    std::vector<float> tops(blocks);
    for (int64_t i = begin; i < end; ++i) {
      float* row = x + i * V;
      const float x_target = row[t[i]];
      const bool write = grad && policy.weight[i] != 0.0f;
      Sums sums;
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t from = b * kBlock, n = std::min(kBlock, V - from);
        const Sums s = write ? block_sums<true>(row + from, n, inverse) : block_sums<false>(row + from, n, inverse);
        tops[b] = s.max;
        sums.merge(s, inverse);
      }
      const float logp = sums.logp(x_target, inverse);
      const TokenLoss loss = token_loss(policy, i, logp);
      const float values[] = {loss.loss, loss.ratio, loss.clipped_low, loss.clipped_high, loss.kl, logp,
                              static_cast<float>(sums.entropy()), static_cast<float>(sums.lse(inverse))};
      for (int64_t k = 0; k < 8; ++k) out[k * N + i] = values[k];
      if (!grad) continue;
      if (!write) {
        std::fill(row, row + V, 0.0f);
        continue;
      }
      const float g = policy.weight[i] * loss.slope * inverse;  // d / d logit = g (1[target] - p)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t from = b * kBlock, n = std::min(kBlock, V - from);
        const float c = static_cast<float>(-g * std::exp((static_cast<double>(tops[b]) - sums.max) * inverse) / sums.mass);
#pragma omp simd
        for (int64_t v = 0; v < n; ++v) row[from + v] *= c;
      }
      row[t[i]] = -g * std::expm1(std::min(logp, 0.0f));  // 1 - p, exact for a sure model too
    }
  });
  return stats;
}

}  // namespace toolr0
