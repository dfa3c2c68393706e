// Finds the largest magnitudes of weights, and rounds pieces of them to e4m3, for owners that keep
// weights rounded (float8.cu). Queued on the calling thread's stream and never waited for.
#pragma once

#include <cstdint>

#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// Sets amax, [1] float32, to the largest magnitude of x, or to NaN or infinity if x has one. Every
// run gives the same bits, because the order of the elements does not matter. x: bfloat16, a
// multiple of 8 elements.
void LargestMagnitude(const Tensor& x, const Tensor& amax);

// GEMMs read a scale from a multiple of 16 bytes, so each scale begins a row of four floats.
constexpr int64_t kScaleRow = 4;

// Sets the first elements of the rows of scales, [n, kScaleRow] float32, to the scales of e4m3
// (kernels.h). Their bounds are the largest of of_ranks, [ranks, n] float32 magnitudes.
void ScalesOfRanks(const Tensor& of_ranks, const Tensor& scales);

// Sets y, e4m3, to x / scale. x: bfloat16, a multiple of 8 elements; scale: [1] float32.
// RoundToFloat8 of a whole weight writes the same bytes as this does piece by piece.
void RoundPieceToE4M3(const Tensor& x, const Tensor& scale, const Tensor& y);

}  // namespace cuda
}  // namespace burst
