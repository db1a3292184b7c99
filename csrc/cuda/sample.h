// What csrc/cuda/sample.cu offers to its binding: plain pointers, no header of torch and none of CUDA.
#pragma once

#include <cstdint>

namespace toolr0 {

// Device pointers; rows of V logits follow each other. top_k and top_p may be null.
struct SampleArgs {
  const float* logits;
  const int64_t *seed, *position;
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  int64_t* token;
  float *logp, *entropy;
  uint32_t V;
  float unit;  // masses are multiples of 1 / unit; launch_sample sets it
};

// Launches on a cudaStream_t, without waiting. Returns null, or what went wrong. 1 <= V <= 2^31 - 1.
const char* launch_sample(SampleArgs args, int64_t S, void* stream);

}  // namespace toolr0
