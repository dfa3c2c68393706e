#include "train/generate/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/philox.h"

namespace burst {
namespace {

constexpr uint64_t kSamplingStream = uint64_t{0x5A3B1E} << 32;

}  // namespace

int32_t SampleToken(absl::Span<const float> logits, const SamplingOptions& options, int64_t index) {
  BURST_CHECK(!logits.empty());
  if (options.temperature == 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  // Likeliest first; equal logits in order of token, so that the choice is one function of its
  // arguments.
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  size_t kept = order.size();
  if (options.top_k > 0) kept = std::min(kept, static_cast<size_t>(options.top_k));
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), likelier);
  order.resize(kept);

  // Weights exp((l - max) / temperature); the inverse of their cumulative sum at a uniform number.
  std::vector<double> cumulative;
  double sum = 0;
  for (int32_t token : order) {
    sum += std::exp((double{logits[token]} - double{logits[order[0]]}) / options.temperature);
    cumulative.push_back(sum);
  }
  const double u = UniformFromBits(Philox(options.seed, kSamplingStream, index)[0]) * sum;
  const size_t chosen =
      std::upper_bound(cumulative.begin(), cumulative.end(), u) - cumulative.begin();
  return order[std::min(chosen, order.size() - 1)];
}

}  // namespace burst
