#include "burst/kernels/gpu/sm80/backward.cuh"
#include "burst/kernels/gpu/sm80/configs.h"

namespace burst {
namespace sm80 {

void BackwardD128(const FlashBackwardParams& params) {
  LaunchBackward<BackwardTraits<128, 64, 128, 2, 2, 4>>(params);
}

}  // namespace sm80
}  // namespace burst
