// Computes the changed scores of one head (burst/kernels/scores.h), and the largest of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/scores.h"

namespace burst {
namespace cuda {

template <typename T>
class ChangedScores {
 public:
  __device__ ChangedScores(const FlashAttentionShape& shape, int64_t b, int64_t h)
      : changes_(shape.scores),
        row_(changes_.first_row + b),
        head_(changes_.first_head + h),
        cap_(static_cast<T>(changes_.softcap)),
        slope_(changes_.alibi_slopes == nullptr ? T{0} : static_cast<T>(changes_.alibi_slopes[h])),
        threshold_(DropoutThreshold(changes_.dropout)),
        kept_(static_cast<T>(1 / (1 - changes_.dropout))) {}

  // Returns the changed score of query i and key j of the call. *slope becomes its derivative with
  // respect to `score`.
  __device__ T Score(int64_t i, int64_t j, T score, T* slope) const {
    return ScoreAt(QueryPosition(i), KeyPosition(j), score, slope);
  }

  // Returns the factor of P under dropout: 0, or 1 / (1 - dropout).
  __device__ T Weight(int64_t i, int64_t j) const {
    if (!drops()) return 1;
    const bool kept =
        KeepsWeight(changes_.seed, threshold_, row_, head_, QueryPosition(i), KeyPosition(j));
    return kept ? kept_ : T{0};
  }

  // Returns the changed score for two global positions.
  __device__ __forceinline__ T ScoreAt(int32_t q_position, int32_t k_position, T score,
                                       T* slope) const {
    *slope = 1;
    if (cap_ != 0) {
      const T capped = tanh(score / cap_);
      score = cap_ * capped;
      *slope = 1 - capped * capped;
    }
    if (slope_ == 0) return score;
    const int distance = q_position - k_position;
    return score - slope_ * static_cast<T>(distance < 0 ? -distance : distance);
  }
  // Computes whether dropout keeps the weights of a query and two keys, which mostly share words.
  __device__ __forceinline__ void KeepsPair(int32_t q_position, const int32_t (&k_positions)[2],
                                            bool (&kept)[2]) const {
    PhiloxCounter words = DropoutWords(changes_.seed, row_, head_, q_position, k_positions[0]);
    kept[0] = Word(words, k_positions[0]) >= threshold_;
    if ((k_positions[0] ^ k_positions[1]) >> 2 != 0) {
      words = DropoutWords(changes_.seed, row_, head_, q_position, k_positions[1]);
    }
    kept[1] = Word(words, k_positions[1]) >= threshold_;
  }

  __device__ bool drops() const { return changes_.dropout != 0; }
  __device__ T kept() const { return kept_; }  // factor of a weight that is kept
  __device__ int32_t QueryPosition(int64_t i) const {
    return changes_.q_positions == nullptr ? static_cast<int32_t>(i) : changes_.q_positions[i];
  }
  __device__ int32_t KeyPosition(int64_t j) const {
    return changes_.k_positions == nullptr ? static_cast<int32_t>(j) : changes_.k_positions[j];
  }

 private:
  // Selects without an index, because an array with an index would be in memory.
  __device__ __forceinline__ static uint32_t Word(const PhiloxCounter& words, int32_t position) {
    const uint32_t low = position & 1 ? words[1] : words[0];
    const uint32_t high = position & 1 ? words[3] : words[2];
    return position & 2 ? high : low;
  }

  const ScoreChanges& changes_;
  const int64_t row_, head_;
  const T cap_, slope_;
  const uint32_t threshold_;
  const T kept_;
};

// Computes *largest = max(*largest, value), by any number of threads. As integers, the bits of
// positive floats have the floats' order, and the bits of negative floats the opposite order.
__device__ inline void RaiseTo(float value, float* largest) {
  if (__float_as_int(value) >= 0) {  // false for -0
    atomicMax(reinterpret_cast<int*>(largest), __float_as_int(value));
  } else {
    atomicMin(reinterpret_cast<unsigned*>(largest), __float_as_uint(value));
  }
}

}  // namespace cuda
}  // namespace burst
