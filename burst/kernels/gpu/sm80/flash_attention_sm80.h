// Attention on Ampere and later (mma.sync): bfloat16 operands, float32 statistics and accumulation.
// Serves any head_dim that is a multiple of 8 up to 256 (64, 128 and 256 at full speed), any
// lengths. Rows begin at multiples of 16 bytes; softmax_scale > 0.
//
// Semantics as in burst/kernels/flash_attention.h. Queued on the thread's stream.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm80 {

inline constexpr int64_t kMaxHeadDim = 256;

void Forward(const FlashForwardParams& params);
// dQ is float32 and always added to; dK and dV as params.assign says.
void Backward(const FlashBackwardParams& params);

}  // namespace sm80
}  // namespace burst
