#include "burst/base/check.h"
#include "burst/kernels/flash_attention.h"

namespace burst {

AttentionOperand Operand(const Tensor& tensor) {
  BURST_CHECK(tensor.ndim() == 4 && (tensor.stride(3) == 1 || tensor.dim(3) <= 1))
      << "expected [batch, seqlen, heads, head_dim] with head_dim innermost, got "
      << ToString(tensor.shape());
  return {tensor.raw_data(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

}  // namespace burst
