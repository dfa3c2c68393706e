// Changes attention's scores and weights in addition to the mask. For query i and key j of head h:
//
//   S = softmax_scale q_i k_j
//   S <- softcap tanh(S / softcap)                 softcap (Gemma 2, arXiv 2408.00118)
//   S <- S - slope[h] |position_i - position_j|    ALiBi (Press et al., arXiv 2108.12409)
//   P = exp(S - lse);  O = (M * P) V               dropout of P; M: 0, or 1 / (1 - dropout)
//
// lse does not include dropout, so that calls over disjoint keys merge as usual. Backward, with
// delta = rowsum(dO * O) as usual:
//
//   dV = (M * P)^T dO;  dS = P * (M * (dO V^T) - delta) * (1 - tanh^2);  slopes are constants
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "burst/base/philox.h"

namespace burst {

// The changes in one call of the kernels. Arrays are on the kernels' device. All changes are off by
// default.
struct ScoreChanges {
  double softcap = 0;                   // 0: none
  const float* alibi_slopes = nullptr;  // [num_heads] of the call's query heads; null: none
  double dropout = 0;                   // the probability that a weight is dropped, below 1
  uint64_t seed = 0;                    // the seed of dropout
  int64_t first_head = 0;               // the number, among all query heads, of the call's first
  int64_t first_row = 0;                // the number, for dropout, of the call's first batch row
  // The global positions of the call's queries and keys, which ALiBi and dropout use. They are also
  // global with packed documents, because distances within a document are the same. Null: 0, 1, ...
  const int32_t* q_positions = nullptr;  // [q_len]
  const int32_t* k_positions = nullptr;  // [k_len]

  bool any() const { return softcap != 0 || alibi_slopes != nullptr || dropout != 0; }
};

// Returns how many of 2^32 random words drop a weight.
constexpr uint32_t DropoutThreshold(double dropout) {
  const double words = dropout * 0x1p32 + 0.5;
  return words < 0x1p32 ? static_cast<uint32_t>(words) : ~uint32_t{0};
}

// Returns the random words of the four keys whose positions differ in the last two bits only.
constexpr PhiloxCounter DropoutWords(uint64_t seed, int64_t row, int64_t head, int32_t q_position,
                                     int32_t k_position) {
  return Philox(
      seed, PhiloxCounter{static_cast<uint32_t>(k_position) >> 2, static_cast<uint32_t>(q_position),
                          static_cast<uint32_t>(head), static_cast<uint32_t>(row)});
}

// Returns whether dropout keeps the weight of query head `head` (of all), batch row `row` and two
// global positions. It depends on its arguments alone (decision 6), so the dropped weights are the
// same on any ranks, in any layout, on any device. One call of Philox serves four neighboring keys.
constexpr bool KeepsWeight(uint64_t seed, uint32_t threshold, int64_t row, int64_t head,
                           int32_t q_position, int32_t k_position) {
  return DropoutWords(seed, row, head, q_position, k_position)[k_position & 3] >= threshold;
}

// Returns the paper's slopes: 2^(-8 (h + 1) / H) for H heads, a power of two. Other H take the
// slopes of the next lower power, then every second of twice that power (the authors' code).
inline std::vector<float> AlibiSlopes(int64_t num_heads) {
  int64_t power = 1;
  while (2 * power <= num_heads) power *= 2;
  std::vector<float> slopes;
  for (int64_t h = 0; h < num_heads; ++h) {
    const double exponent = h < power ? 8.0 * (h + 1) / power : 4.0 * (2 * (h - power) + 1) / power;
    slopes.push_back(static_cast<float>(std::exp2(-exponent)));
  }
  return slopes;
}

}  // namespace burst
