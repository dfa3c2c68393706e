#include "train/optimizer/muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "burst/base/parallel.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/matmul.h"
#include "train/optimizer/muon_cuda.h"

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

// The coefficients of a step of Newton and Schulz.
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

// Returns the factor of a direction whose singular values are near 1.
double StepSize(const MuonUpdate& update, const MuonMatrix& matrix) {
  return 0.2 * std::sqrt(static_cast<double>(std::max(matrix.rows, matrix.cols))) * update.lr;
}

template <typename T>
MatrixView<T> View(std::vector<T>* data, int64_t rows, int64_t cols) {
  return {data->data(), rows, cols, cols, false};
}

}  // namespace

template <typename T>
void Orthogonalize(const MatrixView<T>& x) {
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
  const T keep = static_cast<T>(update.keep), step = static_cast<T>(StepSize(update, matrix));
  ForBlocks(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) p[i] = std::fma(keep, p[i], -(step * direction[i]));
  });
}

namespace {

// Orthogonalize for x: [rows cols], divided by its norm, on a GPU.
void OrthogonalizeOnGpu(const MuonMatrix& matrix, const Tensor& x) {
  const int64_t side = std::min(matrix.rows, matrix.cols);
  const auto empty = [&](int64_t n) { return Tensor::Empty({n}, x.dtype(), DeviceType::kCuda); };
  const Tensor gram = empty(side * side), square = empty(side * side), product = empty(x.numel());
  const cuda::Matrix all = cuda::AsMatrix(x, matrix.cols), g = cuda::AsMatrix(gram, side);
  const cuda::Matrix wide = matrix.rows <= matrix.cols ? all : all.Transposed();
  const cuda::Matrix out = cuda::AsMatrix(product, matrix.cols);
  const auto multiply = [](const cuda::Matrix& a, const cuda::Matrix& b, const cuda::Matrix& c) {
    BURST_GPU_KERNEL(MatMul, cuda::MatMulParams{a, b, c});
  };
  for (int step = 0; step < 5; ++step) {
    multiply(wide, wide.Transposed(), g);
    multiply(g, g, cuda::AsMatrix(square, side));
    BURST_GPU_KERNEL(AddScaled, kB, gram, kC, square);
    if (matrix.rows <= matrix.cols) {
      multiply(g, all, out);
    } else {
      multiply(all, g, out);
    }
    BURST_GPU_KERNEL(AddScaled, kA, x, 1.0, product);
  }
}

}  // namespace

void UpdateByMuonOnGpu(const MuonUpdate& update, const MuonMatrix& matrix,
                       const Tensor& coefficients, const Tensor& loss_and_norm,
                       const cuda::AdamWPart& part) {
  const Tensor u = Tensor::EmptyLike(part.m);
  const Tensor norm = Tensor::Empty({1}, DType::kFloat64, DeviceType::kCuda);
  const DType dtype = part.compute.null() ? u.dtype() : DType::kBFloat16;
  const Tensor x = Tensor::Empty({u.numel()}, dtype, DeviceType::kCuda);
  BURST_GPU_KERNEL(MuonDirection, update.momentum, coefficients.Slice(0, cuda::kGradScale, 1),
                   loss_and_norm, part.grads, part.m, u);
  BURST_GPU_KERNEL(L2Norm, u, norm);
  BURST_GPU_KERNEL(DivideByNorm, u, norm, x);
  OrthogonalizeOnGpu(matrix, x);
  BURST_GPU_KERNEL(ApplyMuon, update.keep, StepSize(update, matrix), loss_and_norm, x, part.masters,
                   part.compute);
}

template void Orthogonalize(const MatrixView<float>& x);
template void Orthogonalize(const MatrixView<double>& x);
template void UpdateByMuon(const MuonUpdate&, const MuonMatrix&, const float*, float*, float*);
template void UpdateByMuon(const MuonUpdate&, const MuonMatrix&, const double*, double*, double*);

}  // namespace burst
