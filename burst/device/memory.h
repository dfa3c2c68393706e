// Memory of a device, from a pool that keeps what it has: a training step allocates the same blocks
// again and again, and fresh pages from the system cost more than the arithmetic on them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace burst {

// Where a tensor lives. CUDA devices join this list with the CUDA backend.
enum class DeviceType { kCpu };

// Bytes at work in the whole process (all ranks that are threads of it).
struct MemoryStats {
  int64_t bytes_in_use = 0;    // held by live allocations, after rounding up
  int64_t peak_bytes = 0;      // the most bytes_in_use since the last ResetPeakMemory
  int64_t bytes_reserved = 0;  // taken from the system, in use or kept for reuse
};

// At least `bytes` bytes aligned to 64, uninitialised. Never null; aborts with a message when the
// system has no memory left. Thread-safe.
void* AllocateMemory(DeviceType device, size_t bytes);

// Gives back what AllocateMemory returned for the same size. Thread-safe.
void FreeMemory(DeviceType device, void* data, size_t bytes);

MemoryStats GetMemoryStats(DeviceType device);
void ResetPeakMemory(DeviceType device);

}  // namespace burst
