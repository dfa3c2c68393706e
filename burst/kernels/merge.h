// Merging two partial attentions of the same query over disjoint sets of keys.
#pragma once

#include <cmath>
#include <limits>

namespace burst {

// With m = max(lse_a, lse_b): lse = m + log(e^(lse_a - m) + e^(lse_b - m)), and the outputs are
// weighted O = O_a weight_a + O_b weight_b. Both exponents are at most 0, so nothing overflows; when
// neither saw a key (m = -inf) the result is (O, lse) = (0, -inf).
template <typename T>
struct MergeWeights {
  T lse;
  T a;
  T b;
};

template <typename T>
MergeWeights<T> Merge(T lse_a, T lse_b) {
  const T m = lse_a > lse_b ? lse_a : lse_b;
  if (m == -std::numeric_limits<T>::infinity()) return {m, T{0}, T{0}};
  const T lse = m + std::log(std::exp(lse_a - m) + std::exp(lse_b - m));
  return {lse, std::exp(lse_a - lse), std::exp(lse_b - lse)};
}

}  // namespace burst
