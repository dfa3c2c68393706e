#include "burst/device/event.h"

#include "burst/device/simulated_gpu.h"

#ifdef BURST_WITH_CUDA
#include "burst/device/cuda.h"
#endif

namespace burst {

#ifdef BURST_WITH_CUDA
namespace cuda {
namespace {

void* MakeEvent() {
  cudaEvent_t event = nullptr;
  BURST_CUDA_CHECK(cudaEventCreate(&event));
  return event;
}

void FreeEvent(void* event) { BURST_CUDA_CHECK(cudaEventDestroy(static_cast<cudaEvent_t>(event))); }

void RecordEvent(void* event) {
  BURST_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(event), CurrentStream()));
}

double SecondsBetween(void* begin, void* end) {
  BURST_CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(end)));
  float milliseconds = 0;
  BURST_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin),
                                        static_cast<cudaEvent_t>(end)));
  return 1e-3 * milliseconds;
}

}  // namespace
}  // namespace cuda
#endif

DeviceEvent::DeviceEvent(DeviceType device) {
  if (device == DeviceType::kCuda && SimulatedGpu::Current() == nullptr) {
    event_ = BURST_CUDA_CALL(cuda::MakeEvent());
  }
}

DeviceEvent::~DeviceEvent() {
  if (event_ != nullptr) BURST_CUDA_CALL(cuda::FreeEvent(event_));
}

void DeviceEvent::Record() {
  if (event_ != nullptr) {
    BURST_CUDA_CALL(cuda::RecordEvent(event_));
  } else if (const SimulatedGpu* const gpu = SimulatedGpu::Current(); gpu != nullptr) {
    using Clock = std::chrono::steady_clock;
    const std::chrono::duration<double> now(gpu->now());
    time_ = Clock::time_point(std::chrono::duration_cast<Clock::duration>(now));
  } else {
    time_ = std::chrono::steady_clock::now();
  }
}

double DeviceEvent::SecondsSince(const DeviceEvent& begin) const {
  if (event_ != nullptr) return BURST_CUDA_CALL(cuda::SecondsBetween(begin.event_, event_));
  return std::chrono::duration<double>(time_ - begin.time_).count();
}

}  // namespace burst
