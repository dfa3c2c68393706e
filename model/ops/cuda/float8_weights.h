// Finds the largest magnitudes of weights, for who keeps them (float8.cu). Queued on the calling
// thread's stream and never waited for.
#pragma once

#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// Sets amax, [1] float32, to the largest magnitude of x, or to NaN or infinity if x has one. Every
// run gives the same bits, because the order of the elements does not matter. x: bfloat16, a
// multiple of 8 elements.
void LargestMagnitude(const Tensor& x, const Tensor& amax);

// Sets amax, [n], to the largest magnitudes over ranks. of_ranks: [ranks, n]. Both are float32.
void LargestOfRanks(const Tensor& of_ranks, const Tensor& amax);

}  // namespace cuda
}  // namespace burst
