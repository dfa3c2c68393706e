#include "burst/kernels/flash_attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "burst/base/check.h"
#include "burst/kernels/cpu/flash_attention_cpu.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "burst/kernels/merge.h"
#include "burst/kernels/simulated_attention.h"
#include "burst/tensor/gpu_kernel.h"

namespace burst {

const AttentionKernels& KernelsOf(DeviceType device) {
  static const CpuAttentionKernels cpu;
  if (device == DeviceType::kCpu) return cpu;
  static const SimulatedAttentionKernels simulated;
  if (SimulatedGpu::Current() != nullptr) return simulated;
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
  BURST_GPU_KERNEL(FlashConvert, from, to, addend);
}

namespace {

template <typename T>
void MergeParts(const Tensor& parts, const Tensor& out) {
  const int64_t sets = parts.dim(0), stride = parts.dim(1), q_len = out.dim(1);
  const int64_t heads = out.dim(2), head_dim = out.dim(3), rows = out.numel() / head_dim;
  const T* const data = parts.data<T>();
  std::vector<T> sum(head_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / (q_len * heads), i = row / heads % q_len, h = row % heads;
    const int64_t lse_at = rows * head_dim + (b * heads + h) * q_len + i;
    std::fill(sum.begin(), sum.end(), T(0));
    T lse = -std::numeric_limits<T>::infinity();
    for (int64_t set = 0; set < sets; ++set) {
      const MergeWeights<T> merged = Merge(lse, data[set * stride + lse_at]);
      const T* const part = data + set * stride + row * head_dim;
      for (int64_t c = 0; c < head_dim; ++c) sum[c] = sum[c] * merged.a + part[c] * merged.b;
      lse = merged.lse;
    }
    std::copy(sum.begin(), sum.end(), out.data<T>() + row * head_dim);
  }
}

}  // namespace

void FlashMerge(const Tensor& parts, const Tensor& out) {
  if (out.numel() == 0) return;
  BURST_CHECK(parts.is_contiguous() && out.is_contiguous() && parts.device() == out.device() &&
              parts.dtype() == SumDType(out.dtype()) &&
              parts.dim(1) >= out.numel() / out.dim(3) * (out.dim(3) + 1))
      << ToString(parts.shape()) << " merged to " << ToString(out.shape());
  if (out.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(FlashMerge, parts, out);
    return;
  }
  out.dtype() == DType::kFloat64 ? MergeParts<double>(parts, out) : MergeParts<float>(parts, out);
}

}  // namespace burst
