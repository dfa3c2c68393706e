// For code that calls CUDA: the calling thread's GPU, its stream, and checked calls.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "burst/device/device.h"

namespace burst {
namespace cuda {

// The GPU that the calling thread is bound to and the stream its work is queued on. Contexts live
// as long as the process: a thread that ends leaves its own to the next one.
struct Context {
  int device = 0;
  int rank = 0;  // of the thread bound to it, for messages
  cudaStream_t stream = nullptr;
  int multiprocessors = 0;
  int compute_capability = 0;    // 90: sm_90
  void* staging = nullptr;       // cuda_device.cc's, for uploads
  void* cublas = nullptr;        // model/ops/cuda/matmul.cc keeps its handle here
  cudaEvent_t event = nullptr;   // for ordering other streams after this one
  std::vector<void*> readbacks;  // cuda_device.cc's, idle
};
Context& CurrentContext();
inline cudaStream_t CurrentStream() { return CurrentContext().stream; }

// Ends the program with exit code 1 and a sentence that names the call, the rank and the device:
// after an error of CUDA there is nothing left to run with.
[[noreturn]] void Fail(const char* call, const std::string& error);
void Check(const char* call, cudaError_t error);

}  // namespace cuda
}  // namespace burst

#define BURST_CUDA_CHECK(call) ::burst::cuda::Check(#call, call)
// After a kernel launch.
#define BURST_CUDA_CHECK_LAUNCH(kernel) ::burst::cuda::Check(kernel, cudaGetLastError())
