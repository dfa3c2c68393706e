#include "burst/kernels/gpu/common/shared_memory.h"

#include <algorithm>
#include <atomic>

#include "burst/base/check.h"
#include "burst/device/cuda.h"

namespace burst {
namespace cuda {
namespace {

std::atomic<int64_t> limit{0};

// The limit of a GPU, which is queried once.
struct DeviceLimit {
  DeviceLimit() {
    int value = 0;
    BURST_CUDA_CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                            CurrentContext().device));
    bytes = value;
  }
  int64_t bytes;
};

}  // namespace

int64_t SharedMemoryPerBlock() {
  const int64_t bytes = CurrentContext().Get<DeviceLimit>().bytes;
  return limit == 0 ? bytes : std::min<int64_t>(bytes, limit);
}

void LimitSharedMemory(int64_t bytes) { limit = bytes; }

void AllowSharedMemory(const void* kernel, int64_t bytes) {
  BURST_CHECK(bytes <= SharedMemoryPerBlock())
      << "a kernel needs " << bytes << " bytes of shared memory; a block may have "
      << SharedMemoryPerBlock();
  BURST_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(bytes)));
}

}  // namespace cuda
}  // namespace burst
