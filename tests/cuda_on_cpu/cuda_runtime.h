// The part of CUDA that csrc/cuda/*.cu use, on a CPU: with this folder on g++'s include path they compile as C++ and run.
//
// A thread of a block is a fibre; a fibre runs until a barrier or a shuffle, so atomics are plain additions. The fibres go on in
// random order, and now and then a warp has to wait: where a barrier is missing, some order gives a wrong result. A barrier
// that not all threads reach ends the program. Shared memory is static: it holds what the block before left there.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __device__ inline
#define __shared__ static
#define __launch_bounds__(...)

using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace on_cpu {

constexpr size_t kStack = 1 << 16;

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  bool done;
};

struct Barrier {
  int waiting = 0, generation = 0;
};

inline ucontext_t scheduler;
inline std::vector<Fibre> fibres;
inline std::vector<Barrier> warps;
inline std::vector<uint64_t> lanes;
inline Barrier all;
inline std::function<void()> body;
inline bool moved;  // since the last look at all fibres
inline unsigned me;

inline void wait(Barrier& barrier, int n) {
  const int generation = barrier.generation;
  moved = true;
  if (++barrier.waiting == n) {
    barrier.waiting = 0;
    ++barrier.generation;
  }
  const unsigned mine = me;
  do swapcontext(&fibres[mine].context, &scheduler);
  while (barrier.generation == generation);
  moved = true;
}

inline void start() {
  body();
  fibres[me].done = moved = true;
  swapcontext(&fibres[me].context, &scheduler);
}

inline void run_block(unsigned n, std::mt19937& random) {
  fibres.resize(n);
  warps.assign(n / 32, {});
  lanes.assign(n, 0);
  all = {};
  std::vector<unsigned> order(n);
  moved = true;
  for (unsigned t = 0; t < n; ++t) {
    order[t] = t;
    fibres[t].done = false;
    getcontext(&fibres[t].context);
    fibres[t].context.uc_stack.ss_sp = fibres[t].stack.data();
    fibres[t].context.uc_stack.ss_size = kStack;
    fibres[t].context.uc_link = nullptr;
    makecontext(&fibres[t].context, start, 0);
  }
  for (uint64_t resting = 0; moved || resting;) {  // a bit for each warp that waits until the others can go no further
    resting = !moved ? 0 : resting ? resting : random() & ((1ull << n / 32) - 1);
    moved = false;
    std::shuffle(order.begin(), order.end(), random);
    for (unsigned t : order) {
      if (fibres[t].done || (resting >> t / 32 & 1)) continue;
      threadIdx.x = me = t;
      swapcontext(&scheduler, &fibres[t].context);
    }
  }
  for (const Fibre& fibre : fibres)
    if (!fibre.done) std::fprintf(stderr, "a barrier that not all threads of the block reach\n"), std::abort();
}

template <class T>
T exchange(T value, unsigned from) {  // value of thread `from`, of the same warp
  const unsigned mine = me;
  std::memcpy(&lanes[mine], &value, sizeof value);
  wait(warps[mine / 32], 32);
  std::memcpy(&value, &lanes[from], sizeof value);
  wait(warps[mine / 32], 32);
  return value;
}

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::all, static_cast<int>(blockDim.x)); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return on_cpu::exchange(value, on_cpu::me ^ mask); }
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
  return on_cpu::exchange(value, static_cast<int>(on_cpu::me % 32) < delta ? on_cpu::me : on_cpu::me - delta);
}
template <class T>
T atomicAdd(T* place, T value) {
  const T old = *place;
  *place += value;
  return old;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline const char* cudaGetErrorString(cudaError_t) { return "error"; }
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

template <class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args...), Args... args) {
  std::mt19937 random(0);
  blockDim = config->blockDim;
  gridDim = config->gridDim;
  on_cpu::body = [&] { kernel(args...); };
  for (blockIdx = dim3(0); blockIdx.x < gridDim.x; ++blockIdx.x) on_cpu::run_block(blockDim.x, random);
  return cudaSuccess;
}
