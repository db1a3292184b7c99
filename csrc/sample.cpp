// The next token of every row: temperature, top-k, top-p, and a draw by inverse CDF with one counter-based uniform a row.
//
// No row is sorted. A first pass leaves the mass of every block of the row, so that the draw finds its block among few numbers
// and its token within one block. Truncation needs the value at which the kept set ends: a histogram of counts and masses over
// max - z, 64 bins to the nat, finds the bin that holds it, and only that bin's entries are put in order. Ties go to the lower
// index. The same (seed, position) gives the same token in every implementation, near ties of the cumulative sum apart.
#include "ops.h"
#include "rows.h"

namespace toolr0 {
namespace {

constexpr int kBins = 2048;
constexpr float kBinsPerNat = 64.0f;

uint64_t mix(uint64_t x) {  // SplitMix64's finaliser, as in toolr0_core/rng.py
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

double uniform(int64_t seed, int64_t position) {  // in (0, 1), odd multiples of 2^-52
  const uint64_t s = static_cast<uint64_t>(seed);
  const uint64_t x = mix(mix(s + static_cast<uint64_t>(position) * 0x9E3779B97F4A7C15ULL) ^ s);
  return (static_cast<double>((x >> 13) & 0x7FFFFFFFFFFFFULL) + 0.5) * 0x1p-51;
}

// The kept set: logits above `value`, and those equal to it up to and including place `index`.
struct Cut {
  float value = -kInf;
  int64_t index = std::numeric_limits<int64_t>::max();
  bool keeps(float x, int64_t i) const { return x > value || (x == value && i <= index); }
};

class Row {
 public:
  Row(const float* x, int64_t V, float temperature)
      : x_(x), V_(V), greedy_(temperature == 0.0f), inverse_(greedy_ ? 1.0f : 1.0f / temperature) {}

  // Block sums of what the cut keeps; all of it for the cut that has just been made.
  void sum(const Cut& cut) {
    sums_ = {};
    blocks_.clear();
    const bool all = cut.value == -kInf;
    for (int64_t from = 0; from < V_; from += kBlock) {
      const int64_t n = std::min(kBlock, V_ - from);
      if (all) {
        blocks_.push_back(block_sums<false>(const_cast<float*>(x_) + from, n, inverse_));
      } else {
        float kept[kBlock];
        for (int64_t i = 0; i < n; ++i) kept[i] = cut.keeps(x_[from + i], from + i) ? x_[from + i] : -kInf;
        blocks_.push_back(block_sums<false>(kept, n, inverse_));
      }
      sums_.merge(blocks_.back(), inverse_);
    }
  }

  Cut truncate(int64_t top_k, float top_p) {
    histogram();
    Cut cut;
    double mass = sums_.mass;
    if (top_k > 0 && top_k < V_) mass = first(cut, cut, [&](int64_t count, double) { return count >= top_k; });
    if (top_p < 1.0f) first(cut, cut, [&](int64_t, double sum) { return sum >= top_p * mass; });
    return cut;
  }

  int64_t draw(const Cut& cut, double u) const {
    if (greedy_) return std::max_element(x_, x_ + V_) - x_;
    double left = u * sums_.mass;
    size_t b = 0, last = 0;
    for (; b < blocks_.size(); ++b) {
      const double mass = mass_of_block(blocks_[b]);
      if (mass > 0.0) last = b;
      if (left < mass) break;
      left -= mass;
    }
    if (b == blocks_.size()) b = last, left = kInf;  // rounding: the last token that has mass
    int64_t token = 0;
    for (int64_t i = b * kBlock; i < std::min<int64_t>(V_, (b + 1) * kBlock); ++i) {
      const double e = cut.keeps(x_[i], i) ? mass_of(x_[i]) : 0.0;
      if (e > 0.0) token = i;
      if (left < e) break;
      left -= e;
    }
    return token;
  }

  float logp(int64_t token) const { return sums_.logp(x_[token], inverse_); }
  bool is_finite() const { return std::isfinite(sums_.mass); }  // NaN is in no kept set, and has to show
  float entropy() const { return static_cast<float>(sums_.entropy()); }

 private:
  // 0 where every entry's mass_of is: a block is drawn only if it has an entry that can be.
  double mass_of_block(const Sums& block) const {
    const double z = (static_cast<double>(block.max) - sums_.max) * inverse_;
    return block.mass == 0.0 || z < kLowest ? 0.0 : block.mass * std::exp(z);
  }
  float below(float x) const { return (sums_.max - x) * inverse_; }
  float mass_of(float x) const { return exp_nonpositive(std::min(0.0f, -below(x))); }
  int bin_of(float x) const {
    const float b = below(x) * kBinsPerNat;
    return b < kBins - 1 ? static_cast<int>(b > 0.0f ? b : 0.0f) : kBins - 1;
  }

  void histogram() {
    counts_.assign(kBins, 0);
    masses_.assign(kBins, 0.0);
    float e[kBlock];
    int bin[kBlock];
    for (int64_t from = 0; from < V_; from += kBlock) {
      const int64_t n = std::min(kBlock, V_ - from);
      for (int64_t i = 0; i < n; ++i) {
        e[i] = mass_of(x_[from + i]);
        bin[i] = bin_of(x_[from + i]);
      }
      for (int64_t i = 0; i < n; ++i) {
        counts_[bin[i]]++;
        masses_[bin[i]] += e[i];
      }
    }
  }

  // Walks down from the largest logit over what `within` keeps; `cut` ends where done(count, mass) first holds. Returns the mass.
  template <class Done>
  double first(const Cut& within, Cut& cut, Done done) {
    int64_t count = 0;
    double mass = 0.0;
    for (int b = 0; b < kBins; ++b) {
      if (!done(count + counts_[b], mass + masses_[b]) && b + 1 < kBins) {
        count += counts_[b];
        mass += masses_[b];
        continue;
      }
      std::vector<int64_t> members;
      for (int64_t i = 0; i < V_; ++i)
        if (bin_of(x_[i]) == b && within.keeps(x_[i], i)) members.push_back(i);
      std::sort(members.begin(), members.end(), [&](int64_t i, int64_t j) { return x_[i] != x_[j] ? x_[i] > x_[j] : i < j; });
      for (int64_t i : members) {
        mass += mass_of(x_[i]);
        if (done(++count, mass)) {
          cut = {x_[i], i};
          return mass;
        }
      }
    }
    return mass;
  }

  const float* x_;
  int64_t V_;
  bool greedy_;
  float inverse_;
  Sums sums_;
  std::vector<Sums> blocks_;
  std::vector<int64_t> counts_;
  std::vector<double> masses_;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& seed, const Tensor& position,
                                          const Tensor& temperature, const std::optional<Tensor>& top_k,
                                          const std::optional<Tensor>& top_p) {
  const int64_t S = logits.size(0), V = logits.size(1);
  std::vector<int64_t> sizes{S};
  Tensor token = torch::stable::new_empty(logits, sizes, torch::headeronly::ScalarType::Long);
  Tensor logp = new_floats(logits, {S}), entropy = new_floats(logits, {S});
  const float *x = logits.const_data_ptr<float>(), *t = temperature.const_data_ptr<float>(),
              *p = top_p ? top_p->const_data_ptr<float>() : nullptr;
  const int64_t *seeds = seed.const_data_ptr<int64_t>(), *positions = position.const_data_ptr<int64_t>(),
                *k = top_k ? top_k->const_data_ptr<int64_t>() : nullptr;
  int64_t* token_ = token.mutable_data_ptr<int64_t>();
  float *logp_ = logp.mutable_data_ptr<float>(), *entropy_ = entropy.mutable_data_ptr<float>();
  parallel_for(0, S, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      Row row(x + s * V, V, t[s]);
      Cut cut;
      row.sum(cut);
      const int64_t keep = k ? k[s] : 0;
      const float share = p ? p[s] : 1.0f;
      if (t[s] != 0.0f && row.is_finite() && ((keep > 0 && keep < V) || share < 1.0f)) {
        cut = row.truncate(keep, share);
        row.sum(cut);
      }
      token_[s] = row.draw(cut, uniform(seeds[s], positions[s]));
      logp_[s] = row.logp(token_[s]);
      entropy_[s] = row.entropy();
    }
  });
  return {token, logp, entropy};
}

}  // namespace toolr0
