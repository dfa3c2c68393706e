#include "burst/kernels/gpu/sm80/flash_attention_sm80.h"

#include "burst/kernels/gpu/sm80/configs.h"

namespace burst {
namespace sm80 {

void Forward(const FlashForwardParams& params) {
  if (params.shape.head_dim <= 64) return ForwardD64(params);
  if (params.shape.head_dim <= 128) return ForwardD128(params);
  ForwardD256(params);
}

void Backward(const FlashBackwardParams& params) {
  if (params.shape.head_dim <= 64) return BackwardD64(params);
  if (params.shape.head_dim <= 128) return BackwardD128(params);
  BackwardD256(params);
}

}  // namespace sm80
}  // namespace burst
