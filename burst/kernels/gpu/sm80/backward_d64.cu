#include "burst/kernels/gpu/sm80/backward.cuh"
#include "burst/kernels/gpu/sm80/configs.h"

namespace burst {
namespace sm80 {

void BackwardD64(const FlashBackwardParams& params) {
  LaunchBackward<BackwardTraits<64, 128, 128, 2, 4, 4>>(params);
}

}  // namespace sm80
}  // namespace burst
