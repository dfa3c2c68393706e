// The parts of a dense layer that its products cannot take along, for dtypes without epilogues.
#pragma once

#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// y[i, :] += bias. y: [..., width] contiguous, bias: [width]; one dtype.
void AddBias(const Tensor& y, const Tensor& bias);

// sum = sum over i of y[i, :], in a fixed order, or with `add` sum += that. y: [..., width]
// contiguous; sum: [width], of the accumulator's type of y.
void ColumnSums(const Tensor& y, const Tensor& sum, bool add);

}  // namespace cuda
}  // namespace burst
