// Runs the GPU's part of exact_sum.cc, queued on the calling thread's stream.
#pragma once

#include "burst/tensor/exact_sum.h"

namespace burst {
namespace cuda {

void AddExactly(const Tensor& terms, const ExactGrid& grid, const Tensor& sum, bool assign);

}  // namespace cuda
}  // namespace burst
