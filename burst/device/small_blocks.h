// Keeps small blocks of another program's allocator when they are freed. A call of that allocator
// may take longer than the launch of the kernel that uses the memory.
#pragma once

#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "burst/device/memory.h"

namespace burst {

// A cache in front of `source`, which must outlive it. A freed block of at most kLargest bytes
// serves the next allocation that rounds up to the same power of two. Larger blocks go back at
// once. All threads that share it must order their work, because a block may be given out while a
// GPU still uses it for earlier work.
class SmallBlocks : public MemorySource {
 public:
  static constexpr size_t kLargest = size_t{1} << 20;

  explicit SmallBlocks(MemorySource* source) : source_(*source) {}
  ~SmallBlocks() override;
  SmallBlocks(const SmallBlocks&) = delete;
  SmallBlocks& operator=(const SmallBlocks&) = delete;

  void* Allocate(size_t bytes) override;
  void Free(void* data) override;

 private:
  MemorySource& source_;
  std::mutex mutex_;                                     // never held while source_ is called
  std::unordered_map<void*, size_t> sizes_;              // of small blocks, in use or not
  std::unordered_map<size_t, std::vector<void*>> idle_;  // by size
};

}  // namespace burst
