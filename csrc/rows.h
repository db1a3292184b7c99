// What the CPU ops share: an exp that compilers vectorise, and the sums of a row of logits in one pass over memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace toolr0 {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 1024;  // logits of a row handled at once: 4 KB, so all passes over a block but the first hit L1
constexpr float kLowest = -87.0f;  // e^x is 0 from here down: nothing, next to the row's largest term, which is 1

// e^x for x <= 0 within 2 ulp, and NaN for NaN. 2^n * p(r) with n = round(x / ln 2) and |r| <= ln 2 / 2; no branch.
inline float exp_nonpositive(float x) {
  const float clamped = x < kLowest ? kLowest : x;
  const float n = std::nearbyintf(clamped * 1.44269504f);
  const float r = clamped - n * 0.693359375f - n * -2.12194440e-4f;  // ln 2 in two parts (Cody and Waite)
  float p = 1.9875691500e-4f;  // the minimax polynomial of Cephes' expf
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < kLowest ? 0.0f : p * power;
}

// Of a row of logits x: their largest, sum e^z and sum e^z z with z = (x - max) / temperature. No large number is ever
// subtracted from another, whatever is added to all logits.
struct Sums {
  float max = -kInf;
  double mass = 0.0;
  double weighted = 0.0;

  void merge(const Sums& other, float inverse_temperature) {
    if (other.mass == 0.0) return;
    const float top = std::max(max, other.max);
    rebase(top, inverse_temperature);
    Sums theirs = other;
    theirs.rebase(top, inverse_temperature);
    mass += theirs.mass;
    weighted += theirs.weighted;
  }

  double lse(float inverse_temperature) const { return static_cast<double>(max) * inverse_temperature + std::log(mass); }
  double entropy() const { return std::log(mass) - weighted / mass; }
  float logp(float x, float inverse_temperature) const {
    return static_cast<float>((x - max) * inverse_temperature - std::log(mass));
  }

 private:
  void rebase(float top, float inverse_temperature) {  // the same sums, relative to a larger logit
    if (mass != 0.0) {
      const double z = (static_cast<double>(max) - top) * inverse_temperature, shift = std::exp(z);
      weighted = shift * (weighted + mass * z);
      mass *= shift;
    }
    max = top;
  }
};

// The sums of one block of at most kBlock logits; with keep, e^(z - block's max) is written over the logits.
template <bool keep>
inline Sums block_sums(float* x, int64_t n, float inverse_temperature) {
  float top = -kInf;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
  if (top == -kInf) top = 0.0f;  // nothing but -inf, of mass 0, or NaN, which has to show
  float mass = 0.0f, weighted = 0.0f;
#pragma omp simd reduction(+ : mass, weighted)
  for (int64_t i = 0; i < n; ++i) {
    const float d = (x[i] - top) * inverse_temperature;
    const float e = exp_nonpositive(d);
    mass += e;
    weighted += e * (d < kLowest ? kLowest : d);  // 0 * -inf would be NaN
    if (keep) x[i] = e;
  }
  Sums sums;
  sums.max = mass == 0.0f ? -kInf : top;
  sums.mass = mass;
  sums.weighted = weighted;
  return sums;
}

// The sums of a whole row, which is only read.
inline Sums row_sums(const float* x, int64_t n, float inverse_temperature) {
  Sums sums;
  for (int64_t from = 0; from < n; from += kBlock)
    sums.merge(block_sums<false>(const_cast<float*>(x) + from, std::min(kBlock, n - from), inverse_temperature),
               inverse_temperature);
  return sums;
}

}  // namespace toolr0
