#include "burst/device/memory.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "burst/base/host_memory.h"
#include "burst/device/cuda_backend.h"
#include "burst/device/simulated_gpu.h"

// The sanitizer build turns the pool off, so that every tensor has its own red zones.
#ifndef BURST_MEMORY_POOL
#define BURST_MEMORY_POOL 1
#endif

namespace burst {
namespace {

constexpr size_t kAlignment = 64;
constexpr bool kPooled = BURST_MEMORY_POOL;

// Rounds sizes up to one of eight steps per power of two (at most 12.5 % waste). So blocks of
// nearly equal size can serve each other.
size_t RoundUp(size_t bytes) {
  if (!kPooled) return bytes == 0 ? 1 : bytes;
  size_t step = kAlignment;
  while (step * 16 <= bytes) step *= 2;
  return bytes == 0 ? step : (bytes + step - 1) / step * step;
}

class Pool {
 public:
  void* Allocate(size_t bytes) {
    const size_t size = RoundUp(bytes);
    int64_t in_use = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      void* const block = TakeBlock(size);
      in_use = stats_.bytes_in_use;
      if (block != nullptr) {
        stats_.bytes_in_use += size;
        if (stats_.bytes_in_use > stats_.peak_bytes) stats_.peak_bytes = stats_.bytes_in_use;
        return block;
      }
    }
    OutOfMemory(("out of memory: " + std::to_string(bytes) + " more bytes on top of " +
                 std::to_string(in_use) + " in use; a smaller model, batch or sequence needs less")
                    .c_str());
  }

  void Free(void* data, size_t bytes) {
    const size_t size = RoundUp(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.bytes_in_use -= size;
    if (kPooled && Keep(data, size)) return;
    stats_.bytes_reserved -= size;
    std::free(data);
  }

  MemoryStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void ResetPeak() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.peak_bytes = stats_.bytes_in_use;
  }

 private:
  // Returns an idle block or a new one, or null if the system has no memory left.
  void* TakeBlock(size_t size) {
    const auto idle = free_.find(size);
    if (idle != free_.end() && !idle->second.empty()) {
      void* const block = idle->second.back();
      idle->second.pop_back();
      return block;
    }
    void* block = nullptr;
    if (posix_memalign(&block, kAlignment, size) != 0) block = ReleaseAndRetry(size);
    if (block != nullptr) stats_.bytes_reserved += size;
    return block;
  }

  // Keeps a block for reuse. Returns false if the list of idle blocks itself finds no memory.
  bool Keep(void* block, size_t size) {
    try {
      free_[size].push_back(block);
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  // Hands every idle block back to the system and tries once more.
  void* ReleaseAndRetry(size_t size) {
    for (auto& [block_size, blocks] : free_) {
      for (void* block : blocks) std::free(block);
      stats_.bytes_reserved -= block_size * blocks.size();
      blocks.clear();
    }
    void* block = nullptr;
    return posix_memalign(&block, kAlignment, size) == 0 ? block : nullptr;
  }

  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> free_;
  MemoryStats stats_;
};

Pool& CpuPool() {
  static Pool* pool = new Pool;
  return *pool;
}

thread_local MemorySource* current_source = nullptr;
thread_local DeviceType source_device = DeviceType::kCpu;

}  // namespace

ScopedMemorySource::ScopedMemorySource(MemorySource* source, DeviceType device)
    : outer_(current_source), outer_device_(source_device) {
  current_source = source;
  source_device = device;
}
ScopedMemorySource::~ScopedMemorySource() {
  current_source = outer_;
  source_device = outer_device_;
}

Allocation AllocateMemory(DeviceType device, size_t bytes) {
  if (current_source != nullptr && device == source_device) {
    void* const data = current_source->Allocate(bytes == 0 ? 1 : bytes);
    if (data == nullptr) {
      const std::string message = "out of memory: " + std::to_string(bytes) + " bytes on " +
                                  Name(device) + " that the caller's allocator does not have";
      OutOfMemory(message.c_str());
    }
    return {data, bytes, device, nullptr, current_source};
  }
  if (device == DeviceType::kCuda) return cuda::Allocate(bytes);
  return {CpuPool().Allocate(bytes), bytes, device, nullptr, nullptr};
}

void FreeMemory(const Allocation& allocation) {
  if (allocation.source != nullptr) {
    allocation.source->Free(allocation.data);
  } else if (allocation.device == DeviceType::kCuda) {
    cuda::Free(allocation);
  } else {
    CpuPool().Free(allocation.data, allocation.bytes);
  }
}

MemoryStats GetMemoryStats(DeviceType device) {
  const SimulatedGpu* const simulated = SimulatedGpu::Current();
  if (device == DeviceType::kCuda && simulated != nullptr) return simulated->memory();
  return device == DeviceType::kCuda ? cuda::GetMemoryStats() : CpuPool().stats();
}

void ResetPeakMemory(DeviceType device) {
  SimulatedGpu* const simulated = SimulatedGpu::Current();
  if (device == DeviceType::kCuda && simulated != nullptr) return simulated->ResetPeak();
  device == DeviceType::kCuda ? cuda::ResetPeakMemory() : CpuPool().ResetPeak();
}

}  // namespace burst
