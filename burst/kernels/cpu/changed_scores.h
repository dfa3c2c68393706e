// Changed scores (burst/kernels/scores.h) of one head, one by one: the time of a call that has them
// is mostly theirs.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "burst/kernels/cpu/tile.h"
#include "burst/kernels/flash_attention.h"
#include "burst/kernels/scores.h"

namespace burst {
namespace cpu {

// Scores are to base 2, as everywhere in these kernels.
template <typename T>
class ChangedScores {
 public:
  ChangedScores(const FlashAttentionShape& shape, int64_t b, int64_t h)
      : changes_(shape.scores),
        row_(changes_.first_row + b),
        head_(changes_.first_head + h),
        cap_(static_cast<T>(changes_.softcap * kLog2E)),
        slope_(changes_.alibi_slopes == nullptr
                   ? T{0}
                   : static_cast<T>(changes_.alibi_slopes[h] * kLog2E)),
        threshold_(DropoutThreshold(changes_.dropout)),
        kept_(static_cast<T>(1 / (1 - changes_.dropout))) {}

  // Returns the changed score of query i and key j of the call. *slope becomes its derivative with
  // respect to `score`.
  T Score(int64_t i, int64_t j, T score, T* slope) const {
    *slope = 1;
    if (cap_ != 0) {
      const T tanh = std::tanh(score / cap_);
      score = cap_ * tanh;
      *slope = 1 - tanh * tanh;
    }
    if (slope_ == 0) return score;
    const int64_t distance = int64_t{QueryPosition(i)} - KeyPosition(j);
    return score - slope_ * static_cast<T>(distance < 0 ? -distance : distance);
  }

  bool drops() const { return changes_.dropout != 0; }

  // Returns the factor by which dropout multiplies P.
  T Weight(int64_t i, int64_t j) const {
    if (!drops()) return 1;
    const bool kept =
        KeepsWeight(changes_.seed, threshold_, row_, head_, QueryPosition(i), KeyPosition(j));
    return kept ? kept_ : T{0};
  }

  // scores [keys, queries], `stride` apart.
  void ChangeScores(Range queries, Range keys, T* scores, int64_t stride) const {
    T slope;
    for (int64_t j = keys.begin; j < keys.end; ++j, scores += stride) {
      for (int64_t i = queries.begin; i < queries.end; ++i) {
        T& score = scores[i - queries.begin];
        score = Score(i, j, score, &slope);
      }
    }
  }

  // weights [keys, queries], `stride` apart.
  void Drop(Range queries, Range keys, T* weights, int64_t stride) const {
    if (!drops()) return;
    for (int64_t j = keys.begin; j < keys.end; ++j, weights += stride) {
      for (int64_t i = queries.begin; i < queries.end; ++i) {
        T& weight = weights[i - queries.begin];
        if (weight != 0) weight *= Weight(i, j);
      }
    }
  }

  // Query i, which sees `seen` of `keys`; s and dp: [columns], the first of key keys.begin. s, the
  // scores, become M * P, and dp becomes dS.
  void BackwardRow(int64_t i, Range seen, Range keys, int64_t columns, T lse, T delta, T* s,
                   T* dp) const {
    if (lse == -std::numeric_limits<T>::infinity()) seen.end = seen.begin;  // it saw nothing
    std::fill(s, s + (seen.begin - keys.begin), T{0});
    std::fill(s + (seen.end - keys.begin), s + columns, T{0});
    std::fill(dp, dp + (seen.begin - keys.begin), T{0});
    std::fill(dp + (seen.end - keys.begin), dp + columns, T{0});
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      const int64_t at = j - keys.begin;
      T slope;
      const T p = std::exp2(Score(i, j, s[at], &slope) - lse), weight = Weight(i, j);
      s[at] = p * weight;
      dp[at] = p * (weight * dp[at] - delta) * slope;
    }
  }

 private:
  int32_t QueryPosition(int64_t i) const {
    return changes_.q_positions == nullptr ? static_cast<int32_t>(i) : changes_.q_positions[i];
  }
  int32_t KeyPosition(int64_t j) const {
    return changes_.k_positions == nullptr ? static_cast<int32_t>(j) : changes_.k_positions[j];
  }

  const ScoreChanges& changes_;
  const int64_t row_, head_;
  const T cap_, slope_;
  const uint32_t threshold_;
  const T kept_;
};

}  // namespace cpu
}  // namespace burst
