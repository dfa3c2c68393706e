#include "burst/kernels/flash_attention.h"

#include <algorithm>
#include <cmath>
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

void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend,
                  const int32_t* addend_rows) {
  BURST_CHECK(from.shape() == to.shape() && from.device() == to.device())
      << ToString(from.shape()) << " to " << ToString(to.shape());
  if (from.device() == DeviceType::kCpu) {
    BURST_CHECK(addend_rows == nullptr);
    if (!addend.null()) from.Add(addend);
    return to.CopyFrom(from.To(to.dtype()));
  }
  BURST_GPU_KERNEL(FlashConvert, from, to, addend, addend_rows);
}

namespace {

template <typename T>
void MergeParts(const Tensor& parts, const Tensor& out, const Tensor& sinks) {
  const int64_t sets = parts.dim(0), stride = parts.dim(1), q_len = out.dim(1);
  const int64_t heads = out.dim(2), value_dim = out.dim(3), rows = out.numel() / value_dim;
  const T* const data = parts.data<T>();
  std::vector<T> sum(value_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / (q_len * heads), i = row / heads % q_len, h = row % heads;
    const int64_t lse_at = rows * value_dim + (b * heads + h) * q_len + i;
    std::fill(sum.begin(), sum.end(), T(0));
    T lse = sinks.null() ? -std::numeric_limits<T>::infinity() : sinks.data<T>()[h];
    for (int64_t set = 0; set < sets; ++set) {
      const MergeWeights<T> merged = Merge(lse, data[set * stride + lse_at]);
      const T* const part = data + set * stride + row * value_dim;
      for (int64_t c = 0; c < value_dim; ++c) sum[c] = sum[c] * merged.a + part[c] * merged.b;
      lse = merged.lse;
    }
    std::copy(sum.begin(), sum.end(), out.data<T>() + row * value_dim);
  }
}

template <typename T>
void SinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks, const Tensor& dsinks) {
  const int64_t batch = lse.dim(0), heads = lse.dim(1), q_len = lse.dim(2);
  for (int64_t h = 0; h < heads; ++h) {
    const T sink = sinks.data<T>()[h];
    double sum = 0;
    for (int64_t b = 0; b < batch && sink != -std::numeric_limits<T>::infinity(); ++b) {
      const T* const row_lse = lse.data<T>() + (b * heads + h) * q_len;
      const T* const row_delta = delta.data<T>() + (b * heads + h) * q_len;
      for (int64_t i = 0; i < q_len; ++i) {
        sum -= std::exp(double{sink} - row_lse[i]) * row_delta[i];
      }
    }
    dsinks.data<T>()[h] = static_cast<T>(sum);
  }
}

}  // namespace

void FlashSinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks,
                    const Tensor& dsinks) {
  const auto fits = [&](const Tensor& tensor, const Shape& shape) {
    return tensor.shape() == shape && tensor.dtype() == lse.dtype() &&
           tensor.device() == lse.device() && tensor.is_contiguous();
  };
  BURST_CHECK(lse.ndim() == 3 && fits(lse, lse.shape()) && fits(delta, lse.shape()) &&
              fits(sinks, {lse.dim(1)}) && fits(dsinks, {lse.dim(1)}))
      << "lse " << ToString(lse.shape()) << ", delta " << ToString(delta.shape()) << ", sinks "
      << ToString(sinks.shape()) << ", dsinks " << ToString(dsinks.shape());
  if (lse.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(FlashSinkGrads, lse, delta, sinks, dsinks);
    return;
  }
  lse.dtype() == DType::kFloat64 ? SinkGrads<double>(lse, delta, sinks, dsinks)
                                 : SinkGrads<float>(lse, delta, sinks, dsinks);
}

void FlashMerge(const Tensor& parts, const Tensor& out, const Tensor& sinks) {
  if (out.numel() == 0) return;
  BURST_CHECK(parts.is_contiguous() && out.is_contiguous() && parts.device() == out.device() &&
              parts.dtype() == SumDType(out.dtype()) &&
              parts.dim(1) >= out.numel() / out.dim(3) * (out.dim(3) + 1))
      << ToString(parts.shape()) << " merged to " << ToString(out.shape());
  BURST_CHECK(sinks.null() || (sinks.shape() == Shape{out.dim(2)} && sinks.is_contiguous() &&
                               sinks.dtype() == parts.dtype() && sinks.device() == out.device()))
      << "sinks " << ToString(sinks.shape()) << " for " << ToString(out.shape());
  if (out.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(FlashMerge, parts, out, sinks);
    return;
  }
  if (out.dtype() == DType::kFloat64) return MergeParts<double>(parts, out, sinks);
  const Tensor sum = Is16Bit(out.dtype()) ? Tensor::Empty(out.shape(), parts.dtype()) : out;
  MergeParts<float>(parts, sum, sinks);
  if (Is16Bit(out.dtype())) out.CopyFrom(sum.To(out.dtype()));
}

}  // namespace burst
