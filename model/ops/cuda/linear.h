// The ops whose work is in matrix products, on a GPU: what model/ops declares under the same names.
#pragma once

#include <cstdint>
#include <functional>

#include "burst/autograd/tape.h"

namespace burst {
namespace cuda {

Variable Linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                const Variable& residual, const Shape& y_shape,
                const std::function<void()>& dx_done);

// bfloat16 only.
Variable GeluMlp(Tape& tape, const Variable& x, const Variable& up, const Variable& up_bias,
                 const Variable& down, const Variable& down_bias, const Variable& residual,
                 const std::function<void()>& dx_done);

Variable LinearCrossEntropy(Tape& tape, const Variable& x, const Variable& weight,
                            const Tensor& targets, double scale, int64_t chunk);

}  // namespace cuda
}  // namespace burst
