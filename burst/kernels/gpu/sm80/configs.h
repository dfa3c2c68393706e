// The instantiations of the kernels, one a file.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm80 {

void ForwardD64(const FlashForwardParams& params);
void ForwardD128(const FlashForwardParams& params);
void ForwardD256(const FlashForwardParams& params);

// params.dq is float32 and added to.
void BackwardD64(const FlashBackwardParams& params);
void BackwardD128(const FlashBackwardParams& params);
void BackwardD256(const FlashBackwardParams& params);

}  // namespace sm80
}  // namespace burst
