#include "burst/kernels/gpu/sm80/backward.cuh"
#include "burst/kernels/gpu/sm80/configs.h"

namespace burst {
namespace sm80 {

void BackwardD256(const FlashBackwardParams& params) {
  LaunchBackward<BackwardTraits<256, 64, 64, 1, 2, 2>>(params);
}

}  // namespace sm80
}  // namespace burst
