#include "burst/kernels/flash_attention.h"

#include "burst/base/check.h"
#include "burst/kernels/cpu/flash_attention_cpu.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"

namespace burst {

const AttentionKernels& KernelsOf(DeviceType device) {
  static const CpuAttentionKernels cpu;
  if (device == DeviceType::kCpu) return cpu;
  const AttentionKernels* gpu = BURST_CUDA_CALL(cuda::GpuKernels());
  return *gpu;
}

void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend) {
  BURST_CHECK(from.shape() == to.shape() && from.device() == to.device())
      << ToString(from.shape()) << " to " << ToString(to.shape());
  if (from.device() == DeviceType::kCpu) {
    if (!addend.null()) from.Add(addend);
    return to.CopyFrom(from.To(to.dtype()));
  }
  BURST_CUDA_CALL(cuda::FlashConvert(from, to, addend));
}

}  // namespace burst
