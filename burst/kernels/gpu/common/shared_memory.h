// How much shared memory a thread block may have. Kernels choose their tiles by it.
#pragma once

#include <cstdint>

namespace burst {
namespace cuda {

// Bytes that a thread block may have on the calling thread's GPU: 227 KB on compute capability 9.0
// and 10.0, 163 KB on 8.0, 99 KB on 8.6, 8.9 and 12.0 (CUDA C++ Programming Guide, "Technical
// Specifications per Compute Capability").
int64_t SharedMemoryPerBlock();

// For tests: limits the shared memory of all GPUs of the process to `bytes`; 0 removes the limit.
void LimitSharedMemory(int64_t bytes);

// Call it before a launch of `kernel` with `bytes` bytes of dynamic shared memory, which must be at
// most SharedMemoryPerBlock.
void AllowSharedMemory(const void* kernel, int64_t bytes);

}  // namespace cuda
}  // namespace burst
