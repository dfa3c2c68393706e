// Memory of tiles that lie in cache: its allocation, the distance of rows, and a transposing copy.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <new>

#include "burst/device/memory.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cpu {

// Returns the distance of a tile's rows of n elements: an odd number of cache lines. So a column of
// a tile spreads over all sets of the first-level cache.
template <typename T>
constexpr int64_t TileStride(int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  return ((n + kLine - 1) / kLine | 1) * kLine;
}

// Copies x [rows, cols] transposed: y[c, i] = convert(x[i, c]).
template <typename Element, typename T, typename Convert>
void CopyTransposed(const Element* x, int64_t x_stride, int64_t rows, int64_t cols, T* y,
                    int64_t y_stride, const Convert& convert) {
  constexpr int64_t kBlock = 16;  // rows whose cache lines are read, and written, together
  for (int64_t i0 = 0; i0 < rows; i0 += kBlock) {
    const int64_t i1 = std::min(rows, i0 + kBlock);
    for (int64_t c = 0; c < cols; ++c) {
      for (int64_t i = i0; i < i1; ++i) y[c * y_stride + i] = convert(x[i * x_stride + c]);
    }
  }
}

// Holds scratch memory of a thread's tiles. It is kept from call to call, and so always comes from
// the device's pool.
class ScratchSpace {
 public:
  // Returns buffer number `slot`: at least `count` elements, uninitialized, aligned to 64 bytes.
  // The buffer is valid until the next Get of its slot.
  template <typename T>
  T* Get(int slot, int64_t count) {
    Tensor& tensor = slots_[slot];
    if (tensor.null() || tensor.dtype() != DTypeOf<T>::value || tensor.numel() < count) {
      tensor = Tensor();  // returned to the pool before the larger one is taken
      const ScopedMemorySource pool(nullptr);
      tensor = Tensor::Empty({count}, DTypeOf<T>::value);
    }
    return tensor.data<T>();
  }

 private:
  std::array<Tensor, 10> slots_;
};

// Returns the calling thread's scratch memory. A kernel keeps nothing there between its calls.
// Throws std::bad_alloc without memory. The C library would end the process if it could not
// register the destructor of a thread_local object. So a key of the thread owns the memory.
inline ScratchSpace& ThreadScratch() {
  thread_local ScratchSpace* scratch = nullptr;
  if (scratch == nullptr) {
    static const pthread_key_t key = [] {
      pthread_key_t made;
      const auto destroy = [](void* data) { delete static_cast<ScratchSpace*>(data); };
      if (pthread_key_create(&made, destroy) != 0) throw std::bad_alloc();
      return made;
    }();
    auto made = std::make_unique<ScratchSpace>();
    if (pthread_setspecific(key, made.get()) != 0) throw std::bad_alloc();
    scratch = made.release();
  }
  return *scratch;
}

}  // namespace cpu
}  // namespace burst
