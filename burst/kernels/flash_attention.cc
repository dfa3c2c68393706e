#include "burst/kernels/flash_attention.h"

#include "burst/base/check.h"

namespace burst {

DType SumDType(DType dtype) { return dtype == DType::kBFloat16 ? DType::kFloat32 : dtype; }

AttentionOperand Operand(const Tensor& tensor) {
  BURST_CHECK(tensor.ndim() == 4 && (tensor.stride(3) == 1 || tensor.dim(3) <= 1))
      << "expected [batch, seqlen, heads, head_dim] with head_dim innermost, got "
      << ToString(tensor.shape());
  return {tensor.raw_data(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void FlashForward(DeviceType, const FlashForwardParams& params) { FlashForwardCpu(params); }
void FlashDelta(DeviceType, const FlashDeltaParams& params) { FlashDeltaCpu(params); }
void FlashBackward(DeviceType, const FlashBackwardParams& params) { FlashBackwardCpu(params); }

}  // namespace burst
