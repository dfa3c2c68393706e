#include "burst/device/stream_words.h"

namespace burst {
namespace cuda {

StreamWords::StreamWords()
    : write_(Find("cuStreamWriteValue32")), wait_(Find("cuStreamWaitValue32")) {}

StreamWords::Function* StreamWords::Find(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function*>(function);
}

bool StreamWords::Write(cudaStream_t stream, const volatile uint32_t* word, uint32_t value) const {
  return write_(stream, reinterpret_cast<CUdeviceptr>(word), value,
                CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS;
}

bool StreamWords::Wait(cudaStream_t stream, const volatile uint32_t* word, uint32_t value) const {
  return wait_(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WAIT_VALUE_GEQ) ==
         CUDA_SUCCESS;
}

}  // namespace cuda
}  // namespace burst
