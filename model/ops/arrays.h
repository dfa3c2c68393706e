// The numbers of CPU tensors for the ops, as float or double, and as Eigen arrays. Loops over
// Eigen's arrays (exp and log among them) are vectorized.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstdint>

#include "burst/autograd/tape.h"
#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"

namespace burst {

// data: [size]
template <typename T>
auto AsArray(T* data, int64_t size) {
  return Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>(data, size);
}
template <typename T>
auto AsArray(const T* data, int64_t size) {
  return Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>(data, size);
}

// Calls function(T()) with the type in which the CPU computes with tensors of `dtype`: double for
// float64, else float.
template <typename Function>
auto DispatchComputed(DType dtype, Function&& function) {
  return DispatchFloat(SumDType(dtype), function);
}

// The numbers of a contiguous CPU tensor as T, while the object lives. They are the tensor's
// memory, or for bfloat16 a copy in float32, which is rounded into the tensor at the end.
template <typename T>
class Numbers {
 public:
  Numbers(const Tensor& tensor, bool reads, bool writes) : tensor_(tensor), writes_(writes) {
    if (tensor.null() || tensor.dtype() == DTypeOf<T>::value) return;
    copy_ = Tensor::Empty(tensor.shape(), DTypeOf<T>::value);
    if (reads) copy_.ConvertFrom(tensor);
  }
  ~Numbers() {
    if (!copy_.null() && writes_) tensor_.ConvertFrom(copy_);
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  const Tensor& tensor() const { return copy_.null() ? tensor_ : copy_; }
  // Null for a null tensor.
  operator T*() const { return tensor_.null() ? nullptr : tensor().template data<T>(); }

 private:
  const Tensor tensor_;
  const bool writes_;
  Tensor copy_;  // null where the tensor has T itself
};

// For numbers that are read alone, that are all assigned, and that are added to.
template <typename T>
Numbers<T> ReadAs(const Tensor& tensor) {
  return Numbers<T>(tensor, /*reads=*/true, /*writes=*/false);
}
template <typename T>
Numbers<T> WriteAs(const Tensor& tensor) {
  return Numbers<T>(tensor, /*reads=*/false, /*writes=*/true);
}
template <typename T>
Numbers<T> UpdateAs(const Tensor& tensor) {
  return Numbers<T>(tensor, /*reads=*/true, /*writes=*/true);
}

// Elements of an array that stays in the L1 cache, for intermediates of elementwise loops.
inline constexpr int64_t kTile = 512;
template <typename T>
using Tile = Eigen::Array<T, Eigen::Dynamic, 1, 0, kTile, 1>;

// Calls body(begin, size) on tiles of kTile elements of [0, n), the last one shorter, in parallel.
// The tiles are the same for any number of threads, because exponentials differ in the last bit
// between a loop's vectors and its remainder.
template <typename Body>
void ForEachTile(int64_t n, Body body) {
  ParallelFor((n + kTile - 1) / kTile, 16, [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; ++tile) {
      body(tile * kTile, std::min(kTile, n - tile * kTile));
    }
  });
}

// 1 / (1 + exp(-x))
template <typename Array>
auto Sigmoid(const Array& x) {
  return (typename Array::Scalar(1) + (-x).exp()).inverse();
}

// The buffer that a backward adds the gradient of an input to; scratch memory where the input
// requires none.
inline Tensor GradBuffer(const Variable& input) {
  return input.requires_grad() ? input.MutableGrad() : Tensor::ZerosLike(input.value());
}

// Adds over rows, with the same bits for any number of threads. Calls body(begin, end, partial) for
// blocks of rows, with a zeroed partial sum [width] each, and adds the partials to sum in order.
template <typename T, typename Body>
void SumOverRowBlocks(int64_t rows, int64_t width, T* sum, Body body) {
  constexpr int64_t kRows = 64;
  const int64_t blocks = (rows + kRows - 1) / kRows;
  const Tensor partials = Tensor::Zeros({blocks, width}, DTypeOf<T>::value);
  ParallelFor(blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      body(block * kRows, std::min(rows, (block + 1) * kRows), partials.data<T>() + block * width);
    }
  });
  for (int64_t block = 0; block < blocks; ++block) {
    AsArray(sum, width) += AsArray(partials.data<T>() + block * width, width);
  }
}

}  // namespace burst
