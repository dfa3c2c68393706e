// The functions of a GPU behind device.h and memory.h. cuda_device.cc defines them, or
// cuda_unavailable.cc in a build without CUDA.
#pragma once

#include "burst/device/memory.h"

namespace burst {
namespace cuda {
Allocation Allocate(size_t bytes);
void Free(const Allocation& allocation);
MemoryStats GetMemoryStats();
void ResetPeakMemory();
void Synchronize();
// At least one of the two is GPU memory.
void Copy(void* to, DeviceType to_device, const void* from, DeviceType from_device, size_t bytes);
// The host's buffer of a Readback. The thread that took it gives it back.
void* TakeReadback();
void GiveReadbackBack(void* readback);
void PostReadback(void* readback, const void* from, size_t bytes);
const void* WaitForReadback(void* readback);
// Returns null if the system has no page-locked memory left.
void* AllocatePageLocked(size_t bytes);
// bytes: of the allocation.
void FreePageLocked(void* memory, size_t bytes);
}  // namespace cuda
}  // namespace burst
