#include "model/ops/gelu_mlp.h"

#include "model/ops/cuda/linear.h"
#include "model/ops/gelu.h"
#include "model/ops/linear.h"

namespace burst {

Variable GeluMlp(Tape& tape, const Variable& x, const Variable& up, const Variable& up_bias,
                 const Variable& down, const Variable& down_bias, const Variable& residual,
                 const std::function<void()>& dx_done) {
  if (x.value().device() == DeviceType::kCuda && x.value().dtype() == DType::kBFloat16) {
    return BURST_CUDA_CALL(cuda::GeluMlp(tape, x, up, up_bias, down, down_bias, residual, dx_done));
  }
  const Variable hidden = Gelu(tape, Linear(tape, x, up, up_bias, {}, dx_done));
  return Linear(tape, hidden, down, down_bias, residual);
}

}  // namespace burst
