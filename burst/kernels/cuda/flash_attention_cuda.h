// What flash_attention.cc calls for tensors on a GPU; flash_attention_cuda.cc chooses the kernels.
#pragma once

#include "absl/status/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

absl::Status CheckFlashAttention(DType dtype, int64_t head_dim);
void FlashForward(const FlashForwardParams& params);
void FlashDelta(const FlashDeltaParams& params);
void FlashBackward(const FlashBackwardParams& params);
void FlashConvert(const Tensor& from, const Tensor& to);

}  // namespace cuda
}  // namespace burst
