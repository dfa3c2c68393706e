// What each type of device implements; device.cc chooses by type.
#pragma once

#include "burst/device/memory.h"

namespace burst {
namespace cpu {
void* Allocate(size_t bytes);
void Free(void* data, size_t bytes);
MemoryStats GetMemoryStats();
void ResetPeakMemory();
}  // namespace cpu

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
}  // namespace cuda
}  // namespace burst
