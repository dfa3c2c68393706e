#include "burst/kernels/gpu/sm90/backward_launch.cuh"
#include "burst/kernels/gpu/sm90/configs.h"

namespace burst {
namespace sm90 {

cudaError_t BackwardD64Ranges(const BackwardParams& params, cudaStream_t stream) {
  return LaunchBackwardKernel<BackwardTraits<64, 128, true>>(params, stream);
}

}  // namespace sm90
}  // namespace burst
