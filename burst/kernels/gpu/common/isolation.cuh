// Marks the results that isolation.h repairs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "burst/kernels/gpu/common/isolation.h"

namespace burst {
namespace cuda {

// Marks a group of kMarkRows rows. Groups count over all heads and batch rows.
__device__ __forceinline__ void Mark(int32_t* marks, int64_t group, int bits) {
  marks[0] = 1;
  atomicOr(marks + 1 + group, bits);
}

__device__ __forceinline__ bool IsFinite(float x) { return fabsf(x) < INFINITY; }

// Records which inputs of a backward's block may not be finite. A thread that sees one sets it to
// 1.
struct Suspicion {
  int keys;     // K or V
  int queries;  // Q or dO
};

// Returns whether all numbers are finite and add up to a finite number.
template <int kCount>
__device__ __forceinline__ bool AreFinite(const float (&x)[kCount]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += x[i];
  return IsFinite(sum);
}

// Returns whether a warp's results, 16 rows of kColumns, may depend on keys or values that are not
// finite. Such keys reach all rows of a tile, so each thread looks at its first row only.
template <int kColumns>
__device__ __forceinline__ bool IsPoisoned(const float (&o)[kColumns / 2]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) sum += o[4 * j] + o[4 * j + 1];
  return __any_sync(0xffffffff, !IsFinite(sum));
}

}  // namespace cuda
}  // namespace burst
