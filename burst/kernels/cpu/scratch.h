// Scratch memory of a thread's tiles: kept from call to call, counted by the device's pool.
#pragma once

#include <array>
#include <cstdint>

#include "burst/tensor/tensor.h"

namespace burst {
namespace cpu {

class ScratchSpace {
 public:
  // Buffer number `slot`, at least `count` elements, uninitialised, aligned to 64 bytes. Valid
  // until the next Get of the same slot.
  template <typename T>
  T* Get(int slot, int64_t count) {
    Tensor& tensor = slots_[slot];
    if (tensor.null() || tensor.dtype() != DTypeOf<T>::value || tensor.numel() < count) {
      tensor = Tensor();  // returned to the pool before the larger one is taken
      tensor = Tensor::Empty({count}, DTypeOf<T>::value);
    }
    return tensor.data<T>();
  }

 private:
  std::array<Tensor, 10> slots_;
};

inline ScratchSpace& ThreadScratch() {
  thread_local ScratchSpace scratch;
  return scratch;
}

}  // namespace cpu
}  // namespace burst
