// Accesses the elements of an operand and of a mask in a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

// Returns the place of a row's first element.
__device__ __forceinline__ int64_t Offset(const AttentionOperand& operand, int64_t b, int64_t h,
                                          int64_t row) {
  return b * operand.batch_stride + row * operand.seq_stride + h * operand.head_stride;
}

// Points at one head of a batch row of an operand: row(i) is [head_dim].
template <typename T>
struct Head {
  __device__ Head(const AttentionOperand& operand, int64_t b, int64_t h)
      : data(static_cast<T*>(operand.data) + b * operand.batch_stride + h * operand.head_stride),
        stride(operand.seq_stride) {}
  __device__ T* row(int64_t i) const { return data + i * stride; }

  T* data;
  int64_t stride;
};

// Gives the keys that a query sees, cut to the keys of the call.
class Visible {
 public:
  __device__ Visible(const FlashAttentionShape& shape, int64_t b)
      : begin_(shape.visible.begin == nullptr
                   ? nullptr
                   : shape.visible.begin + b * shape.visible.batch_stride),
        end_(shape.visible.begin == nullptr ? nullptr
                                            : shape.visible.end + b * shape.visible.batch_stride),
        k_len_(static_cast<int>(shape.k_len)) {}

  __device__ int begin(int64_t i) const { return begin_ == nullptr ? 0 : max(0, begin_[i]); }
  __device__ int end(int64_t i) const { return end_ == nullptr ? k_len_ : min(k_len_, end_[i]); }

  // Returns the first query whose keys end after key j, or q_len; next, whose keys begin after it.
  __device__ int64_t FirstEndingAfter(int64_t q_len, int j) const {
    return Search(q_len, [&](int64_t i) { return end(i) > j; });
  }
  __device__ int64_t FirstBeginningAfter(int64_t q_len, int j) const {
    return Search(q_len, [&](int64_t i) { return begin(i) > j; });
  }

 private:
  template <typename Predicate>  // false, ..., false, true, ..., true
  __device__ static int64_t Search(int64_t n, Predicate predicate) {
    int64_t low = 0, high = n;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      predicate(middle) ? high = middle : low = middle + 1;
    }
    return low;
  }

  const int32_t* begin_;
  const int32_t* end_;
  int k_len_;
};

}  // namespace cuda
}  // namespace burst
