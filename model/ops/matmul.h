// GEMMs on raw memory: the only place where the model multiplies matrices on the CPU.
#pragma once

#include <cstdint>

#include "burst/tensor/tensor.h"

namespace burst {

// A matrix in row-major memory, or the transpose of one.
template <typename T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements between the rows in memory (columns when transposed)
  bool transposed = false;

  MatrixView Transposed() const { return {data, cols, rows, stride, !transposed}; }
  MatrixView Rows(int64_t begin, int64_t end) const {
    return {data + begin * (transposed ? 1 : stride), end - begin, cols, stride, transposed};
  }
  MatrixView Cols(int64_t begin, int64_t end) const {
    return {data + begin * (transposed ? stride : 1), rows, end - begin, stride, transposed};
  }
};

// A contiguous tensor as [numel / cols, cols].
template <typename T>
MatrixView<T> AsMatrix(const Tensor& tensor, int64_t cols) {
  BURST_CHECK(tensor.is_contiguous() && cols > 0 && tensor.numel() % cols == 0)
      << ToString(tensor.shape()) << " as rows of " << cols;
  return {tensor.data<T>(), tensor.numel() / cols, cols, cols, false};
}

enum class Into { kAssign, kAccumulate };

// c = a b, or c += a b. a: [m, k], b: [k, n], c: [m, n], not transposed. Any number of
// threads gives the same bits. T: float, double.
template <typename T>
void MatMul(const MatrixView<T>& a, const MatrixView<T>& b, const MatrixView<T>& c, Into into);

}  // namespace burst
