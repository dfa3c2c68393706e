// Memory of a device, from a pool that keeps what it has: a training step allocates the same blocks
// again and again, and fresh pages from the system cost more than the arithmetic on them.
//
// GPU memory is ordered by the stream of the thread that allocates it: a block that is freed may
// serve that thread's next allocation at once, because the kernels that used it are queued before
// those that will. Work on other streams must be joined (by an event) before its memory is freed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "burst/device/device.h"

namespace burst {

// Bytes at work: of the CPU in the whole process (all ranks that are threads of it), of a GPU in
// the calling thread's one.
struct MemoryStats {
  int64_t bytes_in_use = 0;    // held by live allocations, after rounding up
  int64_t peak_bytes = 0;      // the most bytes_in_use since the last ResetPeakMemory
  int64_t bytes_reserved = 0;  // taken from the system, in use or kept for reuse
};

struct Allocation {
  void* data = nullptr;
  size_t bytes = 0;
  DeviceType device = DeviceType::kCpu;
  void* context = nullptr;  // of a GPU: the device and stream it came from
};

// At least `bytes` bytes aligned to 64 (GPU: 256), uninitialised. Never null; ends the program with
// a message when the device has no memory left. Thread-safe.
Allocation AllocateMemory(DeviceType device, size_t bytes);

// Gives back what AllocateMemory returned; from any thread.
void FreeMemory(const Allocation& allocation);

MemoryStats GetMemoryStats(DeviceType device);
void ResetPeakMemory(DeviceType device);

}  // namespace burst
