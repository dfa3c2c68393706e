// How much shared memory a thread block may have. Kernels choose their tiles by it.
#pragma once

#include <cstdint>

namespace burst {
namespace cuda {

// Returns the bytes that a thread block may have on the calling thread's GPU. The limit is 227 KB
// on compute capability 9.0 and 10.0, 163 KB on 8.0, 99 KB on 8.6, 8.9 and 12.0 (CUDA C++
// Programming Guide, "Technical Specifications per Compute Capability").
int64_t SharedMemoryPerBlock();

// Limits the shared memory of all GPUs of the process to `bytes`, for tests; 0 removes the limit.
void LimitSharedMemory(int64_t bytes);

// Allows `kernel` `bytes` bytes of dynamic shared memory, at most SharedMemoryPerBlock. Call it
// before the launch.
void AllowSharedMemory(const void* kernel, int64_t bytes);

}  // namespace cuda
}  // namespace burst
