#include "model/ops/matmul.h"

#include <algorithm>
#include <cstdint>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/gemm.h"
#include "burst/kernels/cpu/scratch.h"

namespace burst {
namespace {

using cpu::kPanelCols;
using cpu::Layout;
using cpu::Update;

// A tile of A, [kTileRows, kDepth], stays in the second-level cache. Panels of B, [kDepth,
// kPanelCols] and at most 32 KiB, pass through the first.
constexpr int64_t kTileRows = 16 * cpu::kBlockRows;
template <typename T>
constexpr int64_t kDepth = std::min<int64_t>(256, (32 << 10) / (sizeof(T) * kPanelCols<T>));

// The largest block of C that a task computes. Larger blocks repeat fewer copies of A and B, but
// need more memory for B.
constexpr int64_t kTaskRows = 2048, kTaskCols = 768;

// The least work to wake a thread for.
constexpr int64_t kMinTaskFlops = 1 << 20;

int64_t DivideUp(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Copies b [depth, at most kPanelCols] into a panel [depth, kPanelCols], with zeros at its end.
template <typename T>
void CopyPanel(const MatrixView<T>& b, T* panel) {
  constexpr int64_t kWidth = kPanelCols<T>;
  const bool full = b.cols == kWidth;
  if (!full) std::fill_n(panel, b.rows * kWidth, T{0});
  if (b.transposed) {
    return cpu::CopyTransposed(b.data, b.stride, b.cols, b.rows, panel, kWidth,
                               [](T x) { return x; });
  }
  for (int64_t l = 0; l < b.rows; ++l) {
    const T* const row = b.data + l * b.stride;
    // A constant number of elements is copied without a call.
    full ? std::copy_n(row, kWidth, panel + l * kWidth)
         : std::copy_n(row, b.cols, panel + l * kWidth);
  }
}

// Copies a, at most [kTileRows, kDepth], into a tile. The order in memory, of which `layout` tells,
// does not change.
template <Layout layout, typename T>
void CopyTile(const MatrixView<T>& a, T* tile, int64_t tile_stride) {
  const int64_t rows = layout == Layout::kRows ? a.rows : a.cols;
  const int64_t cols = layout == Layout::kRows ? a.cols : a.rows;
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(a.data + i * a.stride, cols, tile + i * tile_stride);
  }
}

// Computes c = tile * panel, or c += tile * panel. tile: [c.rows, depth]; panel: [depth,
// kPanelCols], whose first c.cols columns count. It multiplies whole panels: a single row by a
// single vector would have other bits, because GCC does not fuse its sums for some processors.
template <Layout layout, typename T>
void MultiplyPanel(const T* tile, int64_t tile_stride, const T* panel, int64_t depth,
                   const MatrixView<T>& c, Update update) {
  constexpr int64_t kWidth = kPanelCols<T>;
  const auto multiply = [&](T* to, int64_t stride, Update how) {
    cpu::Gemm<layout>(c.rows, kWidth, depth, tile, tile_stride, panel, kWidth, to, stride, how);
  };
  if (c.cols == kWidth) return multiply(c.data, c.stride, update);
  T product[kTileRows * kWidth];
  multiply(product, kWidth, Update::kAssign);
  for (int64_t i = 0; i < c.rows; ++i) {
    T* const row = c.data + i * c.stride;
    for (int64_t j = 0; j < c.cols; ++j) {
      const T sum = product[i * kWidth + j];
      row[j] = update == Update::kAdd ? row[j] + sum : sum;
    }
  }
}

// Computes a block of C through copies of A and B that lie in cache. An element is a sum of sums of
// kDepth products. So its rounding error grows with kDepth + k / kDepth, not with k.
template <Layout layout, typename T>
void MultiplyBlock(const MatrixView<T>& a, const MatrixView<T>& b, const MatrixView<T>& c,
                   Into into) {
  constexpr bool kByRows = layout == Layout::kRows;
  constexpr int64_t kWidth = kPanelCols<T>, kDeep = kDepth<T>;
  constexpr int64_t kStride = cpu::TileStride<T>(kByRows ? kDeep : kTileRows);
  const int64_t panels = DivideUp(c.cols, kWidth);
  cpu::ScratchSpace& scratch = cpu::ThreadScratch();
  T* const tile = scratch.Get<T>(0, kStride * (kByRows ? kTileRows : kDeep));
  T* const packed = scratch.Get<T>(1, panels * kWidth * kDeep);
  const auto columns = [&](const MatrixView<T>& m, int64_t panel) {
    return m.Cols(panel * kWidth, std::min(c.cols, (panel + 1) * kWidth));
  };
  int64_t l = 0;
  do {  // at least once: without products C is zero
    const int64_t depth = std::min(kDeep, a.cols - l);
    const Update update = into == Into::kAssign && l == 0 ? Update::kAssign : Update::kAdd;
    for (int64_t j = 0; j < panels; ++j) {
      CopyPanel(columns(b.Rows(l, l + depth), j), packed + j * kWidth * kDeep);
    }
    for (int64_t i = 0; i < c.rows; i += kTileRows) {
      const int64_t end = std::min(c.rows, i + kTileRows);
      CopyTile<layout>(a.Rows(i, end).Cols(l, l + depth), tile, kStride);
      for (int64_t j = 0; j < panels; ++j) {
        MultiplyPanel<layout>(tile, kStride, packed + j * kWidth * kDeep, depth,
                              columns(c.Rows(i, end), j), update);
      }
    }
    l += depth;
  } while (l < a.cols);
}

// Returns the inner product of two arrays.
template <typename T>
T Dot(const T* x, const T* y, int64_t n) {
  constexpr int kSums = 4;  // at once, because an addition takes several cycles
  constexpr int64_t kLanes = cpu::kLanes<T>;
  cpu::Vec<T> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes) {
    for (int v = 0; v < kSums; ++v) {
      sums[v] += cpu::Load(x + i + v * kLanes) * cpu::Load(y + i + v * kLanes);
    }
  }
  T sum = cpu::HorizontalSum<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// Computes c = a b, or c += a b, for a row a and columns of b that are contiguous in memory. It
// reads b once and copies nothing: this is the product of a token that is generated.
template <typename T>
void MultiplyRow(const MatrixView<T>& a, const MatrixView<T>& b, const MatrixView<T>& c,
                 Into into) {
  const int64_t grain = std::max<int64_t>(1, kMinTaskFlops / std::max<int64_t>(1, 2 * a.cols));
  ParallelFor(c.cols, grain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const T product = Dot(a.data, b.data + j * b.stride, a.cols);
      c.data[j] = into == Into::kAccumulate ? c.data[j] + product : product;
    }
  });
}

// How tasks divide C: into rows * cols blocks.
struct Grid {
  int64_t rows;
  int64_t cols;
};

// Returns the grid of a product [m, k] x [k, panels * width]. There are two tasks a thread, so that
// threads of unequal speed end together, if each has enough work.
Grid TaskGrid(int64_t m, int64_t panels, int64_t width, int64_t k) {
  Grid grid = {DivideUp(m, kTaskRows), DivideUp(panels * width, kTaskCols)};
  const int threads = NumThreads();
  if (threads == 1) return grid;
  const double flops = 2.0 * m * panels * width * k;
  while (grid.rows * grid.cols < 2 * threads &&
         flops >= 2.0 * kMinTaskFlops * grid.rows * grid.cols) {
    (m * grid.cols >= panels * width * grid.rows ? grid.rows : grid.cols) *= 2;
  }
  return {std::min(grid.rows, m), std::min(grid.cols, panels)};
}

}  // namespace

template <typename T>
void MatMul(const MatrixView<T>& a, const MatrixView<T>& b, const MatrixView<T>& c, Into into) {
  BURST_CHECK(a.rows == c.rows && b.cols == c.cols && a.cols == b.rows && !c.transposed)
      << "[" << a.rows << ", " << a.cols << "] x [" << b.rows << ", " << b.cols << "] -> ["
      << c.rows << ", " << c.cols << "]";
  if (c.rows == 0 || c.cols == 0) return;
  if (c.rows == 1 && !a.transposed && b.transposed) return MultiplyRow(a, b, c, into);
  // The order in which an element is summed depends on k only, so any grid gives the same bits.
  constexpr int64_t kWidth = kPanelCols<T>;
  const int64_t panels = DivideUp(c.cols, kWidth);
  const Grid grid = TaskGrid(c.rows, panels, kWidth, a.cols);
  const auto multiply =
      a.transposed ? MultiplyBlock<Layout::kTransposed, T> : MultiplyBlock<Layout::kRows, T>;
  ParallelTasks(grid.rows * grid.cols, [&](int64_t task) {
    const int64_t i = task % grid.rows, j = task / grid.rows;
    const int64_t top = c.rows * i / grid.rows, bottom = c.rows * (i + 1) / grid.rows;
    const int64_t left = panels * j / grid.cols * kWidth;
    const int64_t right = std::min(c.cols, panels * (j + 1) / grid.cols * kWidth);
    multiply(a.Rows(top, bottom), b.Cols(left, right), c.Rows(top, bottom).Cols(left, right), into);
  });
}

template void MatMul(const MatrixView<float>&, const MatrixView<float>&, const MatrixView<float>&,
                     Into);
template void MatMul(const MatrixView<double>&, const MatrixView<double>&,
                     const MatrixView<double>&, Into);

}  // namespace burst
