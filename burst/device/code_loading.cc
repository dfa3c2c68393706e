#include "burst/device/code_loading.h"

#include <vector_types.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "burst/device/cuda.h"

namespace burst {
namespace cuda {
namespace {

// The driver reads the variable once, at the first call.
[[maybe_unused]] const int lazy = setenv("CUDA_MODULE_LOADING", "LAZY", /*overwrite=*/1);

// Returns the kernels of this program, as the host functions that stand for them.
std::vector<const void*>& Kernels() {
  static auto* kernels = new std::vector<const void*>;
  return *kernels;
}

struct MessageStreams {
  std::vector<cudaStream_t> streams;
};

}  // namespace

void LoadKernels() {
  for (const void* kernel : Kernels()) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess) continue;
    (void)cudaGetLastError();
    // These kernels are for another kind of GPU.
    if (error == cudaErrorInvalidDeviceFunction || error == cudaErrorNoKernelImageForDevice) {
      continue;
    }
    Check("cudaFuncGetAttributes", error);
  }
}

void AddMessageStream(cudaStream_t stream) {
  CurrentContext().Get<MessageStreams>().streams.push_back(stream);
}

void RemoveMessageStream(cudaStream_t stream) {
  std::vector<cudaStream_t>& streams = CurrentContext().Get<MessageStreams>().streams;
  streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
}

void AwaitOtherRanks() {
  for (cudaStream_t stream : CurrentContext().Get<MessageStreams>().streams) {
    while (true) {
      const cudaError_t error = cudaStreamQuery(stream);
      if (error == cudaSuccess) break;
      if (error != cudaErrorNotReady) Check("cudaStreamQuery", error);
      (void)cudaGetLastError();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

}  // namespace cuda
}  // namespace burst

// Replaces the function that nvcc's code calls for every kernel before main (the linker's option
// --wrap). So it learns of all kernels of the program, and none can be forgotten.
extern "C" {
void __real___cudaRegisterFunction(void** module, const char* host_function, char* device_function,
                                   const char* device_name, int thread_limit, uint3* thread,
                                   uint3* block, dim3* block_dim, dim3* grid_dim, int* warp_size);
void __wrap___cudaRegisterFunction(void** module, const char* host_function, char* device_function,
                                   const char* device_name, int thread_limit, uint3* thread,
                                   uint3* block, dim3* block_dim, dim3* grid_dim, int* warp_size) {
  burst::cuda::Kernels().push_back(host_function);
  __real___cudaRegisterFunction(module, host_function, device_function, device_name, thread_limit,
                                thread, block, block_dim, grid_dim, warp_size);
}
}
