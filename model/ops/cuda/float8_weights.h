// Finds the largest magnitudes of weights, and rounds pieces of them to e4m3, for owners that keep
// weights rounded (float8.cu). Queued on the calling thread's stream and never waited for.
#pragma once

#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// Sets amax, [1] float32, to the largest magnitude of x, or to NaN or infinity if x has one. Every
// run gives the same bits, because the order of the elements does not matter. x: bfloat16, a
// multiple of 8 elements.
void LargestMagnitude(const Tensor& x, const Tensor& amax);

// Sets amax, [n], to the largest magnitudes over ranks, and scales, [n], to the scales of e4m3 with
// these bounds (kernels.h). of_ranks: [ranks, n] magnitudes. All are float32.
void LargestOfRanks(const Tensor& of_ranks, const Tensor& amax, const Tensor& scales);

// Sets y, e4m3, to x / scale. x: bfloat16, a multiple of 8 elements; scale: [1] float32.
// RoundToFloat8 of a whole weight writes the same bytes as this does piece by piece.
void RoundPieceToE4M3(const Tensor& x, const Tensor& scale, const Tensor& y);

}  // namespace cuda
}  // namespace burst
