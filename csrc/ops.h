// The CPU ops, torch.ops.toolr0.*, over torch's stable ABI: one binary for every torch from 2.11 on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>
#include <vector>

namespace toolr0 {

using torch::stable::parallel_for;
using torch::stable::Tensor;

inline Tensor new_floats(const Tensor& like, std::vector<int64_t> sizes) {
  return torch::stable::new_empty(like, sizes, torch::headeronly::ScalarType::Float);
}

std::tuple<Tensor, Tensor, Tensor> row_logprob(const Tensor& logits, const Tensor& target, double temperature);
Tensor row_logprob_backward(const Tensor& logits, const Tensor& target, const Tensor& grad_logp, const Tensor& grad_entropy,
                            const Tensor& grad_lse, double temperature);
Tensor row_grpo_loss_(Tensor logits, const Tensor& target, const Tensor& given, const Tensor& power, bool has_old, bool has_ref,
                      double beta, double temperature);
std::tuple<Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& seed, const Tensor& position,
                                          const Tensor& temperature, const std::optional<Tensor>& top_k,
                                          const std::optional<Tensor>& top_p);
Tensor decode_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& table,
                        const Tensor& length, double scale);
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps);
std::tuple<Tensor, Tensor> rope(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin);
Tensor swiglu(const Tensor& gate, const Tensor& up);
void write_kv_(const Tensor& k, const Tensor& v, Tensor k_cache, Tensor v_cache, const Tensor& page, const Tensor& offset);

}  // namespace toolr0
