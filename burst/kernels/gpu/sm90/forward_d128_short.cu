#include "burst/kernels/gpu/sm90/configs.h"
#include "burst/kernels/gpu/sm90/forward_launch.cuh"

namespace burst {
namespace sm90 {

cudaError_t ForwardD128Short(const ForwardParams& params, cudaStream_t stream) {
  return LaunchForwardKernel<ForwardTraits<128, 2, 128, 2, 2, false>>(params, stream);
}

}  // namespace sm90
}  // namespace burst
