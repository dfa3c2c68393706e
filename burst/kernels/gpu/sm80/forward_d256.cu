#include "burst/kernels/gpu/sm80/configs.h"
#include "burst/kernels/gpu/sm80/forward.cuh"

namespace burst {
namespace sm80 {

void ForwardD256(const FlashForwardParams& params) {
  LaunchForward<ForwardTraits<256, 128, 64, 8>>(params);
}

}  // namespace sm80
}  // namespace burst
