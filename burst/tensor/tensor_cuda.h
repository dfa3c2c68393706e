// Runs the GPU's part of tensor.cc, queued on the calling thread's stream.
#pragma once

#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// Shapes and dtypes are the same as in Tensor's member functions. Tensors are contiguous, except
// for CopyAll.
void CopyAll(absl::Span<const TensorCopy> copies);
void Convert(const Tensor& from, const Tensor& to);
void Fill(const Tensor& tensor, double value);
void Add(const Tensor& y, const Tensor& x);
void Scale(const Tensor& y, double factor);

}  // namespace cuda
}  // namespace burst
