// The next token of every row, one block a row: temperature, top-k, top-p, and a draw by inverse CDF (dispatch.sample).
//
// Formula. m: the row's largest logit; z = (x - m) log2(e) / T; an entry's mass is floor(2^40 2^z), an integer (fewer bits
// where V passes 2^22, so that no sum reaches 2^63). Sums of integers do not depend on their order, so atomics leave no trace
// in the result. The token is the first whose cumulative mass, in vocabulary order, exceeds floor(u * total), u = hash(seed,
// position) / 2^64. Kept by top-k and top-p are the first entries in the order of (x downwards, index upwards), exactly.
//
// Truncation. A histogram over z, 128 bins to the factor 2, holds counts and masses of what is within 2^-16 of the most likely
// entry. The rest, most of a vocabulary as a rule, is its last bin: no atomics, its number follows from V. The bin in which the
// k-th entry, or the top_p-th part of the mass, lies is known after one scan of 2048 numbers; its entries, few, are collected
// in shared memory, put in order there and scanned. More than a block holds (ties, low temperatures, flat tails) are told apart
// first by 11 bits at a time of the key (x, index), which is unique. A 64-bit sum in shared memory is two words with native
// 32-bit atomics and a carry: the 64-bit atomic there is a loop of compare-and-swap, slow where many lanes meet.
//
// Traffic, in readings of the row (4 V bytes, from L2 after the first where the rows of all running blocks fit it): maximum,
// masses and entropy, and 1 / warps of it to find the token: each warp sums a contiguous part, so the draw finds the part among
// 32 sums and looks only there again. Truncation adds the histogram and one collection each for top-k and top-p. The Triton
// version searches three bits a pass over 30: its language has no scatter into shared memory.
#include "sample.h"
#include "truncate.cuh"

namespace toolr0 {
namespace {

__device__ u64 mix(u64 x) {  // SplitMix64's finaliser, as in toolr0_core/rng.py
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// The entry at which the cumulative mass of what is kept passes aim. part: masses of the warps' parts.
__device__ uint32_t draw(const Truncation& on, const Cut& cut, const u64* part, u64 aim) {
  __shared__ uint32_t token;
  const Row& row = on.row;
  uint32_t warp = 0;
#pragma unroll 1
  for (; warp + 1 < kWarps && aim >= part[warp]; ++warp) aim -= part[warp];
  for (uint32_t from = row.first(warp), end = row.first(warp + 1); from < end; from += kThreads) {
    const uint32_t j = from + threadIdx.x;
    u64 mass = 0, total;
    const float4 v = j < end ? row.load(j) : make_float4(-kInf, -kInf, -kInf, -kInf);
    auto sum = [&](float x, uint32_t i) { mass += cut.keeps(x, i) ? on.mass_of(x) : 0; };
    row.visit(j, v, sum);
    const u64 before = block_scan(mass, total);
    if (aim < total) {
      if (before <= aim && aim < before + mass) {
        mass = before;
        auto find = [&](float x, uint32_t i) {
          const u64 one = cut.keeps(x, i) ? on.mass_of(x) : 0;
          if (mass <= aim && aim < mass + one) token = i;
          mass += one;
        };
        row.visit(j, v, find);
      }
      break;
    }
    aim -= total;
  }
  __syncthreads();
  return token;
}

__global__ void __launch_bounds__(kThreads) sample_kernel(SampleArgs args) {
  __shared__ Shared sh;
  __shared__ u64 part[kWarps];
  const int64_t s = blockIdx.x;
  const Row row(args.logits + s * args.V, args.V);
  float m = -kInf;
  row.each([&](float x, uint32_t) { m = fmaxf(m, x == x ? x : kInf); });  // NaN shows as a maximum that is not finite
  m = block_reduce(m, [](float a, float b) { return fmaxf(a, b); });
  const float temperature = args.temperature[s];
  const bool sane = fabsf(m) < kInf, greedy = temperature == 0.0f;
  const Truncation on{row, sh, m, fminf(1.4426950408889634f / (greedy ? 1.0f : temperature), 3e38f), args.unit};

  Cut cut{-kInf, 0xFFFFFFFFu};
  const int64_t top_k = args.top_k ? args.top_k[s] : 0;
  const float top_p = args.top_p ? args.top_p[s] : 1.0f;
  if (sane && !greedy && ((top_k > 0 && top_k < args.V) || top_p < 1.0f)) cut = on.cut(top_k, top_p);

  u64 mass = 0;
  float weighted = 0.0f;
  uint32_t best = 0xFFFFFFFFu;
  row.each([&](float x, uint32_t i) {
    const float z = on.exponent(x), e = cut.keeps(x, i) ? exp2f(z) : 0.0f;
    mass += static_cast<u64>(e * args.unit);
    weighted += e == 0.0f ? 0.0f : e * z;  // 0 times -inf would be NaN
    if (x == m) best = min(best, i);
  });
  for (int step = 16; step; step >>= 1) mass += __shfl_xor_sync(0xFFFFFFFFu, mass, step);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = mass;
  weighted = block_reduce(weighted, [](float a, float b) { return a + b; });  // its barriers make part complete
  u64 total = 0;
#pragma unroll 4
  for (int w = 0; w < kWarps; ++w) total += part[w];

  uint32_t token;
  if (greedy || !sane) {
    token = block_reduce(best, [](uint32_t a, uint32_t b) { return min(a, b); });
    token = token < args.V ? token : 0;
  } else {
    const u64 seed = args.seed[s], hash = mix(mix(seed + args.position[s] * 0x9E3779B97F4A7C15ULL) ^ seed);
    token = draw(on, cut, part, __umul64hi(hash, total));
  }
  if (threadIdx.x == 0) {
    const float sum = static_cast<float>(total) / args.unit, nan = __uint_as_float(0x7FC00000u), ln2 = 0.6931471805599453f;
    args.token[s] = token;
    args.logp[s] = sane ? (on.exponent(row.x[token]) - log2f(sum)) * ln2 : nan;
    args.entropy[s] = sane ? (log2f(sum) - weighted / sum) * ln2 : nan;
  }
}

}  // namespace

const char* launch_sample(SampleArgs args, int64_t S, void* stream) {
  if (S == 0) return nullptr;
  args.unit = 1099511627776.0f;  // 2^40
  while (args.unit * args.V > 4611686018427387904.0f) args.unit *= 0.5f;  // 2^62
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(S));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, sample_kernel, args);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace toolr0
