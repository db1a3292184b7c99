// csrc/cuda/sample.cu as a shared library for ctypes; see cuda_runtime.h next to this file.
#include "sample.cu"

extern "C" const char* sample_on_cpu(const float* logits, const int64_t* seed, const int64_t* position, const float* temperature,
                                     const int64_t* top_k, const float* top_p, int64_t* token, float* logp, float* entropy,
                                     int64_t S, int64_t V) {
  return toolr0::launch_sample({logits, seed, position, temperature, top_k, top_p, token, logp, entropy,
                                static_cast<uint32_t>(V), 0.0f}, S, nullptr);
}
