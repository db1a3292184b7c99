// The CUDA kernels as implementations of the ops that csrc/ops.cpp declares. Tensors are checked, and made contiguous, by
// kernels/toolr0_kernels/dispatch.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "../ops.h"
#include "sample.h"

namespace toolr0 {
namespace {

std::tuple<Tensor, Tensor, Tensor> sample_cuda(const Tensor& logits, const Tensor& seed, const Tensor& position,
                                               const Tensor& temperature, const std::optional<Tensor>& top_k,
                                               const std::optional<Tensor>& top_p) {
  const int64_t S = logits.size(0), V = logits.size(1);
  STD_TORCH_CHECK(V < (int64_t{1} << 31), "sample: a row has ", V, " logits; 2^31 - 1 is the most");
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  Tensor token = torch::stable::new_empty(logits, {S}, torch::headeronly::ScalarType::Long);
  Tensor logp = new_floats(logits, {S}), entropy = new_floats(logits, {S});
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(logits.get_device_index(), &stream));
  const char* problem = launch_sample(
      {logits.const_data_ptr<float>(), seed.const_data_ptr<int64_t>(), position.const_data_ptr<int64_t>(),
       temperature.const_data_ptr<float>(), top_k ? top_k->const_data_ptr<int64_t>() : nullptr,
       top_p ? top_p->const_data_ptr<float>() : nullptr, token.mutable_data_ptr<int64_t>(), logp.mutable_data_ptr<float>(),
       entropy.mutable_data_ptr<float>(), static_cast<uint32_t>(V), 0.0f},
      S, stream);
  STD_TORCH_CHECK(!problem, "sample: ", problem ? problem : "");
  return {token, logp, entropy};
}

}  // namespace
}  // namespace toolr0

STABLE_TORCH_LIBRARY_IMPL(toolr0, CUDA, m) { m.impl("sample", TORCH_BOX(&toolr0::sample_cuda)); }

// `import toolr0_kernels._cuda` runs the registration above; the module itself is empty.
PyMODINIT_FUNC PyInit__cuda() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
