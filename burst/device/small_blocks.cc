#include "burst/device/small_blocks.h"

#include <new>

namespace burst {
namespace {

size_t RoundUp(size_t bytes) {
  size_t size = 512;
  while (size < bytes) size *= 2;
  return size;
}

}  // namespace

SmallBlocks::~SmallBlocks() {
  for (const auto& [size, blocks] : idle_) {
    for (void* block : blocks) source_.Free(block);
  }
}

void* SmallBlocks::Allocate(size_t bytes) {
  if (bytes > kLargest) return source_.Allocate(bytes);
  const size_t size = RoundUp(bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<void*>& idle = idle_[size];
    if (!idle.empty()) {
      void* const block = idle.back();
      idle.pop_back();
      return block;
    }
  }
  void* const block = source_.Allocate(size);
  if (block == nullptr) return nullptr;
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[block] = size;
    return block;
  } catch (const std::bad_alloc&) {  // the host has no memory for the list
    source_.Free(block);
    return nullptr;
  }
}

void SmallBlocks::Free(void* data) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(data);
    if (found != sizes_.end()) {
      try {
        return idle_[found->second].push_back(data);
      } catch (const std::bad_alloc&) {
        sizes_.erase(found);
      }
    }
  }
  source_.Free(data);
}

}  // namespace burst
