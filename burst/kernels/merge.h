// Merges two partial attentions of the same query over disjoint sets of keys.
#pragma once

#include <cmath>
#include <limits>

#ifdef __CUDACC__
#define BURST_HOST_DEVICE __host__ __device__
#else
#define BURST_HOST_DEVICE
#endif

namespace burst {

// With m = max(lse_a, lse_b) and sum = e^(lse_a - m) + e^(lse_b - m):
//
//   lse = m + log(sum),  O = O_a e^(lse_a - m) / sum + O_b e^(lse_b - m) / sum
//
// Both exponents are at most 0, so nothing overflows. The weights do not use the rounded lse,
// because they would inherit its error of |lse| times the machine's epsilon. If neither saw a key
// (m = -inf), the result is (O, lse) = (0, -inf).
template <typename T>
struct MergeWeights {
  T lse;
  T a;
  T b;
};

template <typename T>
BURST_HOST_DEVICE MergeWeights<T> Merge(T lse_a, T lse_b) {
  constexpr T kEmpty = -std::numeric_limits<T>::infinity();
  const T m = lse_a > lse_b ? lse_a : lse_b;
  if (lse_a == kEmpty && lse_b == kEmpty) return {m, T{0}, T{0}};  // here m may be NaN
  const T a = std::exp(lse_a - m), b = std::exp(lse_b - m);
  return {m + std::log(a + b), a / (a + b), b / (a + b)};
}

// Adds a sink to a row's softmax: a logit of the denominator without a value
// (FlashForwardParams::sinks). The row's exponentials e^(S - max) add up to `sum` (0 and -inf if it
// sees no key). The larger logit becomes the new maximum, so nothing overflows. Returns the factor
// for the row's sum of values.
template <typename T>
BURST_HOST_DEVICE T AddSink(T sink, T* max, T* sum) {
  const T top = *max > sink ? *max : sink;
  if (top == -std::numeric_limits<T>::infinity()) return T{1};
  const T keep = std::exp(*max - top);
  *sum = *sum * keep + std::exp(sink - top);
  *max = top;
  return keep;
}

}  // namespace burst
