// What kernels with one block a row share: sums and scans over the block, and passes over the row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#ifndef TOOLR0_THREADS
#define TOOLR0_THREADS 1024
#endif

namespace toolr0 {
namespace {

constexpr int kThreads = TOOLR0_THREADS;  // a block's: a power of 2 and a multiple of 32
constexpr int kWarps = kThreads / 32;
constexpr float kInf = __builtin_huge_valf();

using u64 = unsigned long long;

template <class T, class Op>
__device__ T block_reduce(T x, Op op) {  // in one order, so floats are deterministic too; every thread gets the result
  __shared__ T part[kWarps];
  for (int step = 16; step; step >>= 1) x = op(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  x = part[0];
#pragma unroll 4
  for (int w = 1; w < kWarps; ++w) x = op(x, part[w]);
  return x;
}

__device__ u64 block_scan(u64 x, u64& total) {  // the sum of the threads before this one
  __shared__ u64 part[kWarps];
  u64 upto = x;
  for (int step = 1; step < 32; step <<= 1) {
    const u64 y = __shfl_up_sync(0xFFFFFFFFu, upto, step);
    if (threadIdx.x % 32 >= step) upto += y;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 31) part[threadIdx.x / 32] = upto;
  __syncthreads();
  u64 before = 0;
  total = 0;
#pragma unroll 4
  for (int w = 0; w < kWarps; ++w) {
    if (w == threadIdx.x / 32) before = total;
    total += part[w];
  }
  return before + upto - x;
}

// A row as 16-byte vectors from the aligned address at or before it; places outside of it read -inf, and their index is >= V.
struct Row {
  const float* x;
  uint32_t V, shift, vectors, share;  // share: vectors a warp

  __device__ Row(const float* x, uint32_t V) : x(x), V(V), shift(reinterpret_cast<uintptr_t>(x) / 4 % 4) {
    vectors = (V + shift + 3) / 4;
    share = (vectors + kWarps - 1) / kWarps;
  }
  __device__ uint32_t first(uint32_t warp) const { return min(warp * share, vectors); }
  __device__ float4 load(uint32_t j) const {
    const uint32_t i = 4 * j - shift;
    if (i < V && V - i >= 4) return *reinterpret_cast<const float4*>(x + i);
    return make_float4(i < V ? x[i] : -kInf, i + 1 < V ? x[i + 1] : -kInf, i + 2 < V ? x[i + 2] : -kInf,
                       i + 3 < V ? x[i + 3] : -kInf);
  }
  template <class F>
  __device__ void visit(uint32_t j, const float4& v, F& f) const {
    const uint32_t i = 4 * j - shift;
    f(v.x, i), f(v.y, i + 1), f(v.z, i + 2), f(v.w, i + 3);
  }
  template <class F>
  __device__ void each(F f) const {  // f(logit, index) for this warp's part, two vectors on their way at once
    const uint32_t end = first(threadIdx.x / 32 + 1);
    for (uint32_t j = first(threadIdx.x / 32) + threadIdx.x % 32; j < end; j += 64) {
      const float4 v = load(j), w = j + 32 < end ? load(j + 32) : v;
      visit(j, v, f);
      if (j + 32 < end) visit(j + 32, w, f);
    }
  }
};

}  // namespace
}  // namespace toolr0
