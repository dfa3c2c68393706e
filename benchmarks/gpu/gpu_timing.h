// Times work that is queued on a GPU.
#pragma once

#include <functional>

#include "burst/device/cuda.h"

namespace burst {

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
  // Returns the seconds that the work queued by `body` takes.
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
