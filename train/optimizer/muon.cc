#include "train/optimizer/muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "burst/base/parallel.h"

namespace burst {
namespace {

constexpr int64_t kBlock = 1 << 14;  // elements that one call of a loop takes

// Calls body(begin, end) for blocks of n elements.
template <typename Body>
void ForBlocks(int64_t n, const Body& body) {
  ParallelFor((n + kBlock - 1) / kBlock, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(i * kBlock, std::min(n, (i + 1) * kBlock));
  });
}

template <typename T>
MatrixView<T> View(std::vector<T>* data, int64_t rows, int64_t cols) {
  return {data->data(), rows, cols, cols, false};
}

}  // namespace

template <typename T>
void Orthogonalize(const MatrixView<T>& x) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  const int64_t n = x.rows * x.cols, side = std::min(x.rows, x.cols), longer = n / side;
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += double{x.data[i]} * double{x.data[i]};
  if (squares == 0) return;
  const T scale = static_cast<T>(1 / std::sqrt(squares));
  ForBlocks(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x.data[i] *= scale;
  });
  // wide: [side, longer], of which gram has the products of rows
  std::vector<T> gram_data(side * side), square_data(side * side), product_data(n);
  const MatrixView<T> gram = View(&gram_data, side, side), square = View(&square_data, side, side);
  for (int step = 0; step < 5; ++step) {
    const MatrixView<T> wide = x.rows <= x.cols ? x : x.Transposed();
    MatMul(wide, wide.Transposed(), gram, Into::kAssign);
    MatMul(gram, gram, square, Into::kAssign);
    ForBlocks(side * side, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        gram_data[i] = static_cast<T>(kB) * gram_data[i] + static_cast<T>(kC) * square_data[i];
      }
    });
    // In x's own layout the product is gram x, or x gram (gram is symmetric).
    const MatrixView<T> product = View(&product_data, x.rows, x.cols);
    if (x.rows <= x.cols) {
      MatMul(gram, x, product, Into::kAssign);
    } else {
      MatMul(x, gram, product, Into::kAssign);
    }
    ForBlocks(side * longer, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        x.data[i] = static_cast<T>(kA) * x.data[i] + product_data[i];
      }
    });
  }
}

template <typename T>
void UpdateByMuon(const MuonUpdate& update, const MuonMatrix& matrix, const T* g, T* p, T* m) {
  const int64_t n = matrix.rows * matrix.cols;
  const T momentum = static_cast<T>(update.momentum), rest = static_cast<T>(1 - update.momentum);
  const T grad_scale = static_cast<T>(update.grad_scale);
  std::vector<T> direction(n);
  ForBlocks(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T gradient = rest * (g[i] * grad_scale);
      m[i] = std::fma(momentum, m[i], gradient);
      direction[i] = std::fma(momentum, m[i], gradient);
    }
  });
  Orthogonalize(View(&direction, matrix.rows, matrix.cols));
  const double size = 0.2 * std::sqrt(static_cast<double>(std::max(matrix.rows, matrix.cols)));
  const T keep = static_cast<T>(update.keep), step = static_cast<T>(update.lr * size);
  ForBlocks(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p[i] = std::fma(keep, p[i], -(step * direction[i]));
  });
}

template void Orthogonalize(const MatrixView<float>& x);
template void Orthogonalize(const MatrixView<double>& x);
template void UpdateByMuon(const MuonUpdate&, const MuonMatrix&, const float*, float*, float*);
template void UpdateByMuon(const MuonUpdate&, const MuonMatrix&, const double*, double*, double*);

}  // namespace burst
