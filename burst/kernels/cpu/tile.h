// What the forward and the backward share: addressing, tiles of the score matrix, masks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "Eigen/Core"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cpu {

// Rows of queries, and of keys, that one tile of scores covers. 128 x 128 floats and their operands
// at head_dim 128 stay in the second-level cache, and the products are large enough for Eigen to
// reach about 85 % of its rate on large matrices.
inline constexpr int64_t kBlockM = 128;
inline constexpr int64_t kBlockN = 128;

template <typename T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename T>
using MatrixView = Eigen::Map<Matrix<T>, Eigen::Unaligned, Eigen::OuterStride<>>;

// Rows [begin, begin + rows) of one head: [rows, head_dim], rows seq_stride apart.
template <typename T>
MatrixView<T> Rows(const AttentionOperand& operand, int64_t b, int64_t h, int64_t begin,
                   int64_t rows, int64_t head_dim) {
  T* data = static_cast<T*>(operand.data) + b * operand.batch_stride + h * operand.head_stride +
            begin * operand.seq_stride;
  return MatrixView<T>(data, rows, head_dim, Eigen::OuterStride<>(operand.seq_stride));
}

template <typename T>
MatrixView<T> Scratch(T* data, int64_t rows, int64_t columns) {
  return MatrixView<T>(data, rows, columns, Eigen::OuterStride<>(columns));
}

// The mask of one batch row.
class Mask {
 public:
  Mask(const FlashAttentionShape& shape, int64_t b) : k_len_(shape.k_len) {
    if (shape.visible.begin == nullptr) return;
    begin_ = shape.visible.begin + b * shape.visible.batch_stride;
    end_ = shape.visible.end + b * shape.visible.batch_stride;
  }

  int64_t begin(int64_t i) const { return begin_ == nullptr ? 0 : begin_[i]; }
  int64_t end(int64_t i) const { return end_ == nullptr ? k_len_ : end_[i]; }

  // No query of [i0, i1) sees a key outside of [begin(i0), end(i1 - 1)), as both only grow. Every one
  // sees all of [j0, j1) when:
  bool Full(int64_t i0, int64_t i1, int64_t j0, int64_t j1) const {
    return begin(i1 - 1) <= j0 && j1 <= end(i0);
  }

  // The columns [first, last) of a tile that starts at key j0 and has n columns that query i sees.
  void Columns(int64_t i, int64_t j0, int64_t n, int64_t* first, int64_t* last) const {
    *first = std::clamp<int64_t>(begin(i) - j0, 0, n);
    *last = std::clamp<int64_t>(end(i) - j0, *first, n);
  }

 private:
  const int64_t k_len_;
  const int32_t* begin_ = nullptr;
  const int32_t* end_ = nullptr;
};

}  // namespace cpu
}  // namespace burst
