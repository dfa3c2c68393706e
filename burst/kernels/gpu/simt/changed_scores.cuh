// Changed scores (burst/kernels/scores.h) of one head, and the largest of them.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/scores.h"

namespace burst {
namespace simt {

template <typename T>
class ChangedScores {
 public:
  __device__ ChangedScores(const FlashAttentionShape& shape, int64_t b, int64_t h)
      : changes_(shape.scores),
        row_(b),
        head_(changes_.first_head + h),
        cap_(static_cast<T>(changes_.softcap)),
        slope_(changes_.alibi_slopes == nullptr ? T{0} : static_cast<T>(changes_.alibi_slopes[h])),
        threshold_(DropoutThreshold(changes_.dropout)),
        kept_(static_cast<T>(1 / (1 - changes_.dropout))) {}

  // Of query i and key j of the call. *slope: the derivative by `score`.
  __device__ T Score(int64_t i, int64_t j, T score, T* slope) const {
    *slope = 1;
    if (cap_ != 0) {
      const T capped = tanh(score / cap_);
      score = cap_ * capped;
      *slope = 1 - capped * capped;
    }
    if (slope_ == 0) return score;
    const int distance = QueryPosition(i) - KeyPosition(j);
    return score - slope_ * static_cast<T>(distance < 0 ? -distance : distance);
  }

  // What dropout multiplies P by.
  __device__ T Weight(int64_t i, int64_t j) const {
    if (changes_.dropout == 0) return 1;
    const bool kept =
        KeepsWeight(changes_.seed, threshold_, row_, head_, QueryPosition(i), KeyPosition(j));
    return kept ? kept_ : T{0};
  }

 private:
  __device__ int32_t QueryPosition(int64_t i) const {
    return changes_.q_positions == nullptr ? static_cast<int32_t>(i) : changes_.q_positions[i];
  }
  __device__ int32_t KeyPosition(int64_t j) const {
    return changes_.k_positions == nullptr ? static_cast<int32_t>(j) : changes_.k_positions[j];
  }

  const ScoreChanges& changes_;
  const int64_t row_, head_;
  const T cap_, slope_;
  const uint32_t threshold_;
  const T kept_;
};

// *largest = max(*largest, value), by any number of threads; the bits of floats of one sign are in
// their order, of negative ones in the opposite.
__device__ inline void RaiseTo(float value, float* largest) {
  if (value >= 0) {
    atomicMax(reinterpret_cast<int*>(largest), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(largest), __float_as_uint(value));
  }
}

}  // namespace simt
}  // namespace burst
