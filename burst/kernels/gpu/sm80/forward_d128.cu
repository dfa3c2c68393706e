#include "burst/kernels/gpu/sm80/configs.h"
#include "burst/kernels/gpu/sm80/forward.cuh"

namespace burst {
namespace sm80 {

void ForwardD128(const FlashForwardParams& params) {
  LaunchForward<ForwardTraits<128, 128, 64, 4>>(params);
}

}  // namespace sm80
}  // namespace burst
