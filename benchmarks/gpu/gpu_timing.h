// Functions that benchmarks of one GPU share: numbers to work on, and the time of queued work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "burst/base/philox.h"
#include "burst/device/cuda.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Normal numbers with the given standard deviation, repeated after 65,536, on the GPU.
inline Tensor NormalOnGpu(const Shape& shape, DType dtype, double deviation = 1) {
  const Tensor block = Tensor::Empty({1 << 16}, DType::kFloat32);
  for (int64_t i = 0; i < block.numel(); ++i) {
    const PhiloxCounter bits = Philox(1, 2, i);
    block.data<float>()[i] = static_cast<float>(deviation * NormalFromBits(bits[0], bits[1])[0]);
  }
  const Tensor source = block.To(dtype).To(DeviceType::kCuda);
  const Tensor result = Tensor::Empty(shape, dtype, DeviceType::kCuda);
  const Tensor flat = result.View({result.numel()});
  for (int64_t at = 0; at < flat.numel(); at += source.numel()) {
    const int64_t size = std::min(source.numel(), flat.numel() - at);
    flat.Slice(0, at, size).CopyFrom(source.Slice(0, 0, size));
  }
  return result;
}

class EventTimer {
 public:
  EventTimer() {
    BURST_CUDA_CHECK(cudaEventCreate(&start_));
    BURST_CUDA_CHECK(cudaEventCreate(&stop_));
  }
  ~EventTimer() {
    (void)cudaEventDestroy(start_);
    (void)cudaEventDestroy(stop_);
  }
  // Seconds that the work queued by `body` takes.
  double Time(const std::function<void()>& body) {
    BURST_CUDA_CHECK(cudaEventRecord(start_, cuda::CurrentStream()));
    body();
    BURST_CUDA_CHECK(cudaEventRecord(stop_, cuda::CurrentStream()));
    BURST_CUDA_CHECK(cudaEventSynchronize(stop_));
    float ms = 0;
    BURST_CUDA_CHECK(cudaEventElapsedTime(&ms, start_, stop_));
    return 1e-3 * ms;
  }

 private:
  cudaEvent_t start_, stop_;
};

}  // namespace burst
