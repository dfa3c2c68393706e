// Memory of a device, from a pool that keeps freed blocks. A training step allocates blocks of the
// same sizes again and again, and fresh pages from the system cost more than the arithmetic on
// them.
//
// GPU memory is ordered by the stream of the thread that allocates it. A freed block may serve that
// thread's next allocation at once: kernels that used it come first on the stream. Before memory is
// freed, the thread's stream must wait (by an event) for work on other streams that uses it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "burst/device/device.h"

namespace burst {

// Statistics in bytes: on the CPU of the whole process, with all ranks that are its threads; on a
// GPU of the calling thread's GPU.
struct MemoryStats {
  int64_t bytes_in_use = 0;    // in live allocations, after rounding up
  int64_t peak_bytes = 0;      // the peak of bytes_in_use since the last ResetPeakMemory
  int64_t bytes_reserved = 0;  // taken from the system, in use or kept for reuse
};

// Memory that another program provides instead of the pool, for a library inside that program.
// Thread-safe; must outlive the memory that it gave.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  // Returns at least `bytes` > 0 bytes, aligned as AllocateMemory's, or null if there are none.
  virtual void* Allocate(size_t bytes) = 0;
  virtual void Free(void* data) = 0;
};

// While it lives, the calling thread's allocations on `device` come from `source`. With a null
// `source`, and on other devices, they come from the pool.
class ScopedMemorySource {
 public:
  explicit ScopedMemorySource(MemorySource* source, DeviceType device = DeviceType::kCpu);
  ~ScopedMemorySource();
  ScopedMemorySource(const ScopedMemorySource&) = delete;
  ScopedMemorySource& operator=(const ScopedMemorySource&) = delete;

 private:
  MemorySource* const outer_;
  const DeviceType outer_device_;
};

struct Allocation {
  void* data = nullptr;
  size_t bytes = 0;
  DeviceType device = DeviceType::kCpu;
  void* context = nullptr;         // of a GPU: the device and stream it came from
  MemorySource* source = nullptr;  // null: the pool
};

// Returns at least `bytes` bytes, aligned to 64 (GPU: 256) and uninitialized. Never null: if the
// device has no memory left, the program ends with a message. Thread-safe.
Allocation AllocateMemory(DeviceType device, size_t bytes);

// Frees memory that AllocateMemory returned. Any thread may call it.
void FreeMemory(const Allocation& allocation);

MemoryStats GetMemoryStats(DeviceType device);
void ResetPeakMemory(DeviceType device);

}  // namespace burst
