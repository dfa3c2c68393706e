// Checks the tensors of a call of attention, by errors that name the tensor.
#pragma once

#include "absl/status/status.h"
#include "burst/tensor/tensor.h"

namespace burst {

// InvalidArgument unless the tensor has this shape, dtype and device, and stride 1 along its last
// axis.
absl::Status CheckTensor(const char* name, const Tensor& tensor, const Shape& shape, DType dtype,
                         DeviceType device);

}  // namespace burst
