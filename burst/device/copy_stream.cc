#include "burst/device/copy_stream.h"

#include <algorithm>

#include "burst/device/simulated_gpu.h"

#ifdef BURST_WITH_CUDA
#include "burst/device/cuda.h"
#endif

namespace burst {

#ifdef BURST_WITH_CUDA
namespace cuda {
namespace {

cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(void* event) { return static_cast<cudaEvent_t>(event); }

void* MakeStream() {
  cudaStream_t stream = nullptr;
  BURST_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void* MakeEvent() {
  cudaEvent_t event = nullptr;
  BURST_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

void FreeStream(void* stream) {
  CheckAtEnd("cudaStreamSynchronize", cudaStreamSynchronize(AsStream(stream)));
  CheckAtEnd("cudaStreamDestroy", cudaStreamDestroy(AsStream(stream)));
}

void FreeEvent(void* event) { CheckAtEnd("cudaEventDestroy", cudaEventDestroy(AsEvent(event))); }

void WaitForEvent(void* event) {
  BURST_CUDA_CHECK(cudaStreamWaitEvent(CurrentStream(), AsEvent(event)));
}

void CopyBeside(void* stream, void* begin, void* to, const void* from, size_t bytes, void* end) {
  BURST_CUDA_CHECK(cudaEventRecord(AsEvent(begin), CurrentStream()));
  BURST_CUDA_CHECK(cudaStreamWaitEvent(AsStream(stream), AsEvent(begin)));
  BURST_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, AsStream(stream)));
  BURST_CUDA_CHECK(cudaEventRecord(AsEvent(end), AsStream(stream)));
}

}  // namespace
}  // namespace cuda
#endif

namespace {

bool IsRealGpu(DeviceType device) {
  return device == DeviceType::kCuda && SimulatedGpu::Current() == nullptr;
}

}  // namespace

CopyStream::CopyStream(DeviceType device) {
  if (!IsRealGpu(device)) return;
  stream_ = BURST_CUDA_CALL(cuda::MakeStream());
  event_ = BURST_CUDA_CALL(cuda::MakeEvent());
}

CopyStream::~CopyStream() {
  if (stream_ == nullptr) return;
  BURST_CUDA_CALL(cuda::FreeStream(stream_));
  BURST_CUDA_CALL(cuda::FreeEvent(event_));
}

CopyStream::Mark::Mark(DeviceType device) {
  if (IsRealGpu(device)) event_ = BURST_CUDA_CALL(cuda::MakeEvent());
}

CopyStream::Mark::~Mark() {
  if (event_ != nullptr) BURST_CUDA_CALL(cuda::FreeEvent(event_));
}

void CopyStream::Mark::Wait() const {
  if (event_ != nullptr) {
    BURST_CUDA_CALL(cuda::WaitForEvent(event_));
  } else if (SimulatedGpu* const gpu = SimulatedGpu::Current(); gpu != nullptr) {
    gpu->WaitUntil(time_);
  }
}

void CopyStream::Copy(void* to, DeviceType to_device, const void* from, DeviceType from_device,
                      size_t bytes, Mark* behind) {
  if (stream_ != nullptr) {
    BURST_CUDA_CALL(cuda::CopyBeside(stream_, event_, to, from, bytes, behind->event_));
  } else if (const SimulatedGpu* const gpu = SimulatedGpu::Current(); gpu != nullptr) {
    free_ = std::max(free_, gpu->now()) + static_cast<double>(bytes) / gpu->model().host_link;
    behind->time_ = free_;
  } else {
    CopyMemory(to, to_device, from, from_device, bytes);
  }
}

}  // namespace burst
