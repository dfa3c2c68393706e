// Computes a query's probability of a key, and the gradient of its score.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "burst/kernels/gpu/common/changed_scores.cuh"

namespace burst {
namespace cuda {

// Computes P = exp(scale S - lse) and dS = P * (dP - delta) for a query that sees the key. With
// kChanged, for query i and key j with changed scores and weights (burst/kernels/scores.h); p is
// then the P in dV's equation.
template <typename T, bool kChanged>
struct Probability {
  __device__ Probability(T s, T dp, T scale, T lse, T delta, bool visible,
                         const ChangedScores<T>& changed, int64_t i, int64_t j) {
    visible = visible && lse != -static_cast<T>(INFINITY);
    if constexpr (kChanged) {
      p = ds = 0;
      if (!visible) return;
      T slope;
      p = exp(changed.Score(i, j, scale * s, &slope) - lse);
      const T weight = changed.Weight(i, j);
      ds = p * (weight * dp - delta) * slope;
      p *= weight;
    } else {
      p = visible ? exp(scale * s - lse) : T{0};
      ds = visible ? p * (dp - delta) : T{0};
    }
  }
  T p, ds;
};

}  // namespace cuda
}  // namespace burst
