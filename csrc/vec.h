// Vectors of 16 floats, in as many registers as the machine needs for them, and the sums of four at once.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace toolr0 {

typedef float Vec __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16;

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

inline Half folded(Vec v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}

// The sums of four vectors, by halves: a sum of one, lane after lane, would take longer than its products.
inline Quarter totals(const Vec* v) {
  const Half a = folded(v[0]), b = folded(v[1]), c = folded(v[2]), d = folded(v[3]);
  const Half ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  const Half cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
  const Half e = __builtin_shufflevector(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
  return __builtin_shufflevector(e, e, 0, 2, 4, 6) + __builtin_shufflevector(e, e, 1, 3, 5, 7);
}

}  // namespace toolr0
