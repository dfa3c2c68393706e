#include "model/ops/matmul.h"

#include <Eigen/Core>
#include <algorithm>

#include "burst/base/check.h"
#include "burst/base/parallel.h"

namespace burst {
namespace {

using Eigen::Dynamic;

// The columns of a matrix in row-major memory are `stride` apart when it is read transposed: then
// it is a column-major matrix.
template <typename T, int kOrder>
auto AsEigen(const MatrixView<T>& m) {
  using Matrix = Eigen::Matrix<T, Dynamic, Dynamic, kOrder>;
  return Eigen::Map<Matrix, 0, Eigen::OuterStride<>>(m.data, m.rows, m.cols,
                                                     Eigen::OuterStride<>(m.stride));
}

template <typename T, int kOrderA, int kOrderB>
void Gemm(const MatrixView<T>& a, const MatrixView<T>& b, const MatrixView<T>& c, Into into) {
  auto result = AsEigen<T, Eigen::RowMajor>(c);
  if (into == Into::kAccumulate) {
    result.noalias() += AsEigen<T, kOrderA>(a) * AsEigen<T, kOrderB>(b);
  } else {
    result.noalias() = AsEigen<T, kOrderA>(a) * AsEigen<T, kOrderB>(b);
  }
}

template <typename T>
void SingleThreaded(const MatrixView<T>& a, const MatrixView<T>& b, const MatrixView<T>& c,
                    Into into) {
  constexpr int kRow = Eigen::RowMajor, kColumn = Eigen::ColMajor;
  if (a.transposed) {
    b.transposed ? Gemm<T, kColumn, kColumn>(a, b, c, into) : Gemm<T, kColumn, kRow>(a, b, c, into);
  } else {
    b.transposed ? Gemm<T, kRow, kColumn>(a, b, c, into) : Gemm<T, kRow, kRow>(a, b, c, into);
  }
}

}  // namespace

template <typename T>
void MatMul(const MatrixView<T>& a, const MatrixView<T>& b, const MatrixView<T>& c, Into into) {
  BURST_CHECK(a.rows == c.rows && b.cols == c.cols && a.cols == b.rows && !c.transposed)
      << "[" << a.rows << ", " << a.cols << "] x [" << b.rows << ", " << b.cols << "] -> ["
      << c.rows << ", " << c.cols << "]";
  // A thread's part: enough work to wake a thread for, and a few registers high.
  constexpr int64_t kMinFlops = 1 << 20, kMinExtent = 16;
  const bool by_rows = c.rows >= c.cols;
  const int64_t flops = std::max<int64_t>(2 * a.cols * std::min(c.rows, c.cols), 1);
  ParallelFor(std::max(c.rows, c.cols), std::max(kMinExtent, kMinFlops / flops),
              [&](int64_t begin, int64_t end) {
                if (by_rows) {
                  SingleThreaded(a.Rows(begin, end), b, c.Rows(begin, end), into);
                } else {
                  SingleThreaded(a, b.Cols(begin, end), c.Cols(begin, end), into);
                }
              });
}

template void MatMul(const MatrixView<float>&, const MatrixView<float>&, const MatrixView<float>&,
                     Into);
template void MatMul(const MatrixView<double>&, const MatrixView<double>&,
                     const MatrixView<double>&, Into);

}  // namespace burst
