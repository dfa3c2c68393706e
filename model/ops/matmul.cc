#include "model/ops/matmul.h"

#include <Eigen/Core>
#include <algorithm>

#include "burst/base/check.h"
#include "burst/base/parallel.h"

namespace burst {
namespace {

using Eigen::Dynamic;

// When a matrix in row-major memory is read transposed, it is a column-major matrix whose columns
// are `stride` apart.
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
  // A thread's part is whole panels of Eigen's kernel, with enough work to wake a thread for. The
  // order in which Eigen adds up an element depends on its place in a panel and on k, not on m and
  // n. So cuts between panels give all elements the bits of one thread. The last part has the rest.
  // No part is small enough that Eigen would use another kernel for it.
  using Kernel = Eigen::internal::gebp_traits<T, T>;
  constexpr int64_t kRows = 16, kCols = 48, kMinExtent = 48, kMinFlops = 1 << 20;
  static_assert(kRows % Kernel::nr == 0 && kCols % Kernel::mr == 0, "not whole panels");
  const bool by_rows = c.rows >= c.cols;
  const int64_t extent = by_rows ? c.rows : c.cols, panel = by_rows ? kRows : kCols;
  const int64_t flops = std::max<int64_t>(2 * a.cols * std::min(c.rows, c.cols), 1);
  const int64_t least = std::max(kMinExtent, kMinFlops / flops);
  const int64_t panels = std::max<int64_t>(1, extent / panel);
  ParallelFor(panels, (least + panel - 1) / panel, [&](int64_t first, int64_t last) {
    const int64_t begin = first * panel, end = last == panels ? extent : last * panel;
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
