// Truncation: the cut at which the k best entries of a row, or the best with a part of its mass, end (see sample.cu).
#pragma once

#include "rows.cuh"

namespace toolr0 {
namespace {

constexpr uint32_t kDigit = 11, kBins = 1u << kDigit;  // kThreads is at most kBins
constexpr float kBinsPerBit = 128.0f;

// The kept set: logits above `value`, and those equal to it up to and including place `index`.
struct Cut {
  float value;
  uint32_t index;
  __device__ bool keeps(float x, uint32_t i) const { return x > value || (x == value && i <= index); }
};

// Where a sum over bins reaches a goal: the bin, how many entries it has, and count and mass of the bins before it.
struct Spot {
  uint32_t bin, inside;
  u64 count, mass;
};

struct Shared {
  uint32_t count[kBins], low[kBins], high[kBins];  // of a bin: entries, and the two words of their mass
  u64 list[kThreads];
  uint32_t listed;
  Spot spot;
  Cut cut;
  u64 kept;
};

// Smaller is better: x downwards, then the index upwards. -0 is 0.
__device__ u64 key_of(float x, uint32_t i) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return static_cast<u64>(bits >> 31 ? bits : bits ^ 0x7FFFFFFFu) << 32 | i;
}

__device__ float value_of(u64 key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(bits >> 31 ? bits : bits ^ 0x7FFFFFFFu);
}

struct Truncation {
  Row row;
  Shared& sh;
  float m, scale, unit;

  __device__ float exponent(float x) const { return (x - m) * scale; }
  __device__ u64 mass_of(float x) const { return static_cast<u64>(exp2f(exponent(x)) * unit); }
  __device__ uint32_t bin_of(float x) const {
    return static_cast<uint32_t>(fminf(exponent(x) * -kBinsPerBit, static_cast<float>(kBins - 1)));
  }

  __device__ void clear() const {
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < kBins; b += kThreads) sh.count[b] = sh.low[b] = sh.high[b] = 0;
    __syncthreads();
  }
  __device__ void add(uint32_t b, u64 mass) const {
    atomicAdd(&sh.count[b], 1u);
    const uint32_t low = static_cast<uint32_t>(mass);
    uint32_t high = static_cast<uint32_t>(mass >> 32);
    if (low && static_cast<uint32_t>(atomicAdd(&sh.low[b], low) + low) < low) ++high;
    if (high) atomicAdd(&sh.high[b], high);
  }

  __device__ u64 histogram() const {  // over z; returns the mass of the row
    clear();
    u64 total = 0;
    row.each([&](float x, uint32_t) {
      const u64 mass = mass_of(x);
      const uint32_t b = bin_of(x);
      total += mass;
      if (b < kBins - 1) add(b, mass);
    });
    return block_reduce(total, [](u64 a, u64 b) { return a + b; });
  }

  // The bin in which the sum reaches `goal`; the last one, which holds what no bin counts, where none does. all: entries.
  __device__ Spot locate(bool by_mass, u64 goal, uint32_t all) const {
    constexpr uint32_t per = kBins / kThreads;
    u64 count = 0, mass = 0, counts, masses;
    __syncthreads();
    for (uint32_t b = threadIdx.x * per; b < (threadIdx.x + 1) * per; ++b) {
      count += sh.count[b];
      mass += static_cast<u64>(sh.high[b]) << 32 | sh.low[b];
    }
    Spot spot{threadIdx.x * per, 0, block_scan(count, counts), block_scan(mass, masses)};
    if (threadIdx.x == 0) sh.spot = {kBins - 1, static_cast<uint32_t>(all - counts), counts, masses};
    __syncthreads();
    const u64 before = by_mass ? spot.mass : spot.count;
    if (before < goal && before + (by_mass ? mass : count) >= goal) {
      for (;; ++spot.bin) {
        const u64 one = static_cast<u64>(sh.high[spot.bin]) << 32 | sh.low[spot.bin];
        spot.inside = sh.count[spot.bin];
        if ((by_mass ? spot.mass + one : spot.count + spot.inside) >= goal) break;
        spot.count += spot.inside;
        spot.mass += one;
      }
      sh.spot = spot;
    }
    __syncthreads();
    return sh.spot;
  }

  // The smallest set of the best entries whose number (by_mass: mass) reaches the goal, and its mass. Starts from histogram().
  __device__ Cut search(bool by_mass, u64 goal, u64& kept, bool& whole) const {
    if (!whole) histogram();
    whole = true;
    Spot spot = locate(by_mass, goal, row.V);
    const uint32_t bin = spot.bin;
    u64 known = 0, prefix = 0, mass = spot.mass;
    goal -= by_mass ? spot.mass : spot.count;
    for (int shift = 64; spot.inside > kThreads;) {
      const int width = shift < kDigit ? shift : kDigit;
      const u64 mask = (1u << width) - 1;
      shift -= width;
      whole = false;
      clear();
      row.each([&](float x, uint32_t i) {
        if (bin_of(x) != bin || i >= row.V) return;
        const u64 key = key_of(x, i);
        if (((key ^ prefix) & known) == 0) add(key >> shift & mask, mass_of(x));
      });
      spot = locate(by_mass, goal, spot.inside);
      goal -= by_mass ? spot.mass : spot.count;
      mass += spot.mass;
      prefix |= static_cast<u64>(spot.bin) << shift;
      known |= mask << shift;
    }
    collect(bin, prefix, known, spot.inside);
    const bool there = threadIdx.x < spot.inside;
    const u64 key = sh.list[threadIdx.x], one = there ? mass_of(value_of(key)) : 0;
    u64 total;
    const u64 before = block_scan(one, total);
    if (there && (by_mass ? before < goal && before + one >= goal : threadIdx.x + 1 == goal)) {
      sh.cut = {value_of(key), static_cast<uint32_t>(key)};
      sh.kept = mass + before + one;
    }
    __syncthreads();
    kept = sh.kept;
    return sh.cut;
  }

  __device__ void collect(uint32_t bin, u64 prefix, u64 known, uint32_t n) const {  // into sh.list, in order
    const uint32_t me = threadIdx.x;
    sh.list[me] = ~0ULL;
    if (me == 0) sh.listed = 0;
    __syncthreads();
    row.each([&](float x, uint32_t i) {
      const u64 key = key_of(x, i);
      if (bin_of(x) == bin && i < row.V && ((key ^ prefix) & known) == 0) sh.list[atomicAdd(&sh.listed, 1u)] = key;
    });
    __syncthreads();
    for (uint32_t size = 2; size < 2 * n; size <<= 1) {  // bitonic, of as many as there are
      for (uint32_t step = size / 2; step; step >>= 1) {
        const uint32_t other = me ^ step;
        if (other > me) {
          const u64 a = sh.list[me], b = sh.list[other];
          if ((a > b) == ((me & size) == 0)) sh.list[me] = b, sh.list[other] = a;
        }
        __syncthreads();
      }
    }
  }

  __device__ Cut cut(int64_t top_k, float top_p) const {
    Cut cut{-kInf, 0xFFFFFFFFu};
    bool whole = true;
    u64 kept = histogram();
    if (top_k > 0 && top_k < row.V) cut = search(false, top_k, kept, whole);
    if (top_p < 1.0f) {
      const u64 goal = static_cast<u64>(ceil(static_cast<double>(top_p) * static_cast<double>(kept)));
      cut = search(true, goal < 1 ? 1 : goal < kept ? goal : kept, kept, whole);
    }
    return cut;
  }
};

}  // namespace
}  // namespace toolr0
