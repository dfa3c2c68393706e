#include <algorithm>

#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/kernels.h"

namespace burst {
namespace cuda {
namespace {

template <typename T>
__global__ void AddBiasKernel(int64_t n, int64_t width, const T* __restrict__ bias, T* y) {
  using A = Accumulator<T>;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    y[i] = ConvertTo<T>(ConvertTo<A>(y[i]) + ConvertTo<A>(bias[i % width]));
  }
}

// A block sums kColumns words of columns over its share of the rows, kRows rows at a time.
constexpr int kColumns = 32, kRows = 8;

// Sets partials[blockIdx.y, :] = sum over the rows of share blockIdx.y. y: [rows, words of N]
template <typename T, int N>
__global__ void __launch_bounds__(kColumns* kRows)
    ColumnSumsKernel(int64_t rows, int64_t words, const T* __restrict__ y,
                     Accumulator<T>* __restrict__ partials) {
  using A = Accumulator<T>;
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x;
  A sums[N] = {};
  if (column < words) {
    const auto* word = reinterpret_cast<const Vec<T, N>*>(y) + column;
    const int64_t step = int64_t{gridDim.y} * kRows;
#pragma unroll 4
    for (int64_t i = blockIdx.y * kRows + threadIdx.y; i < rows; i += step) {
      const Vec<T, N> value = word[i * words];
#pragma unroll
      for (int j = 0; j < N; ++j) sums[j] += ConvertTo<A>(value[j]);
    }
  }
  __shared__ A shared[kRows][kColumns * N];
#pragma unroll
  for (int j = 0; j < N; ++j) shared[threadIdx.y][threadIdx.x * N + j] = sums[j];
  __syncthreads();
  const int64_t first = blockIdx.x * int64_t{kColumns} * N, width = words * N;
  for (int i = threadIdx.y * kColumns + threadIdx.x; i < kColumns * N; i += kColumns * kRows) {
    A total = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) total += shared[row][i];
    if (first + i < width) partials[blockIdx.y * width + first + i] = total;
  }
}

// Sets or adds sum[i] = sum over shares of partials[share, i]. A block sums kColumns columns, a
// thread every kShareRows-th share.
constexpr int kShareRows = 32;

template <typename A>
__global__ void __launch_bounds__(kColumns* kShareRows)
    SumSharesKernel(int64_t shares, int64_t width, const A* __restrict__ partials, bool add,
                    A* sum) {
  const int64_t i = blockIdx.x * int64_t{kColumns} + threadIdx.x;
  A own = 0;
  if (i < width) {
#pragma unroll 4
    for (int64_t share = threadIdx.y; share < shares; share += kShareRows) {
      own += partials[share * width + i];
    }
  }
  __shared__ A shared[kShareRows][kColumns];
  shared[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y > 0 || i >= width) return;
  A total = 0;
#pragma unroll
  for (int row = 0; row < kShareRows; ++row) total += shared[row][threadIdx.x];
  sum[i] = add ? sum[i] + total : total;
}

template <typename T, int N>
void LaunchColumnSums(const Tensor& y, const Tensor& sum, bool add) {
  using A = Accumulator<T>;
  const int64_t width = sum.numel(), rows = y.numel() / width, words = width / N;
  const int64_t columns = (words + kColumns - 1) / kColumns;
  // Takes enough blocks to fill the GPU, and enough rows for each.
  const int64_t wanted = 8 * CurrentContext().multiprocessors / columns;
  const int64_t shares = std::clamp<int64_t>(wanted, 1, (rows + 4 * kRows - 1) / (4 * kRows));
  const Tensor partials = Tensor::Empty({shares, width}, sum.dtype(), DeviceType::kCuda);
  ColumnSumsKernel<T, N><<<dim3(columns, shares), dim3(kColumns, kRows), 0, CurrentStream()>>>(
      rows, words, Data<T>(y), Data<A>(partials));
  BURST_CUDA_CHECK_LAUNCH("ColumnSums");
  SumSharesKernel<<<(width + kColumns - 1) / kColumns, dim3(kColumns, kShareRows), 0,
                    CurrentStream()>>>(shares, width, Data<A>(partials), add, Data<A>(sum));
  BURST_CUDA_CHECK_LAUNCH("SumShares");
}

}  // namespace

void AddBias(const Tensor& y, const Tensor& bias) {
  const int64_t n = y.numel();
  if (n == 0) return;
  DispatchDtype(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    AddBiasKernel<<<GridSize(n, 256), 256, 0, CurrentStream()>>>(n, bias.numel(), Data<T>(bias),
                                                                 Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("AddBias");
}

void ColumnSums(const Tensor& y, const Tensor& sum, bool add) {
  if (y.numel() == 0) {
    if (!add) sum.Fill(0);
    return;
  }
  DispatchDtype(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const bool vectorized =
        sum.numel() % kVecSize<T> == 0 && reinterpret_cast<uintptr_t>(y.raw_data()) % 16 == 0;
    vectorized ? LaunchColumnSums<T, kVecSize<T>>(y, sum, add)
               : LaunchColumnSums<T, 1>(y, sum, add);
  });
}

}  // namespace cuda
}  // namespace burst
