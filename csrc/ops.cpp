// Schemas and registrations. Shapes, dtypes and ranges are checked by kernels/toolr0_kernels/dispatch.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(toolr0, m) {
  m.def("row_logprob(Tensor logits, Tensor target, float temperature) -> (Tensor, Tensor, Tensor)");
  m.def("row_logprob_backward(Tensor logits, Tensor target, Tensor grad_logp, Tensor grad_entropy, Tensor grad_lse, "
        "float temperature) -> Tensor");
  m.def("row_grpo_loss_(Tensor(a!) logits, Tensor target, Tensor given, Tensor power, bool has_old, bool has_ref, float beta, "
        "float temperature) -> Tensor");
  m.def("sample(Tensor logits, Tensor seed, Tensor position, Tensor temperature, Tensor? top_k, Tensor? top_p) "
        "-> (Tensor, Tensor, Tensor)");
  m.def("decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor table, Tensor length, float scale) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("write_kv_(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page, Tensor offset) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(toolr0, CPU, m) {
  m.impl("row_logprob", TORCH_BOX(&toolr0::row_logprob));
  m.impl("row_logprob_backward", TORCH_BOX(&toolr0::row_logprob_backward));
  m.impl("row_grpo_loss_", TORCH_BOX(&toolr0::row_grpo_loss_));
  m.impl("sample", TORCH_BOX(&toolr0::sample));
  m.impl("decode_attention", TORCH_BOX(&toolr0::decode_attention));
  m.impl("linear", TORCH_BOX(&toolr0::linear));
  m.impl("rms_norm", TORCH_BOX(&toolr0::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&toolr0::add_rms_norm));
  m.impl("rope", TORCH_BOX(&toolr0::rope));
  m.impl("swiglu", TORCH_BOX(&toolr0::swiglu));
  m.impl("write_kv_", TORCH_BOX(&toolr0::write_kv_));
}

// `import toolr0_kernels._C` runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
