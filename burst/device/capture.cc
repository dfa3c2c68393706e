#include "burst/device/capture.h"

#ifdef BURST_WITH_CUDA
#include "burst/device/cuda.h"
#endif

namespace burst {

#ifdef BURST_WITH_CUDA
bool IsCaptured(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  (void)cudaGetLastError();
  return error == cudaErrorStreamCaptureImplicit;
}
bool IsCurrentStreamCaptured() { return IsCaptured(cuda::CurrentStream()); }
#else
bool IsCaptured(void*) { return false; }
bool IsCurrentStreamCaptured() { return false; }
#endif

}  // namespace burst
