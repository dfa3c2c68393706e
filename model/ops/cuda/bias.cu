#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/bias.h"

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

// A block owns 32 columns; its rows of threads stride over the rows of y and meet in shared memory.
constexpr int kColumns = 32, kRows = 16;

template <typename T>
__global__ void AddColumnSumsKernel(int64_t rows, int64_t width, const T* __restrict__ y,
                                    Accumulator<T>* sum) {
  using A = Accumulator<T>;
  __shared__ A partial[kRows][kColumns];
  const int64_t column = blockIdx.x * int64_t{kColumns} + threadIdx.x;
  A total = 0;
  if (column < width) {
    for (int64_t i = threadIdx.y; i < rows; i += kRows)
      total += ConvertTo<A>(y[i * width + column]);
  }
  partial[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int i = 1; i < kRows; ++i) total += partial[i][threadIdx.x];
  sum[column] += total;
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

void AddColumnSums(const Tensor& y, const Tensor& sum) {
  const int64_t width = sum.numel(), blocks = (width + kColumns - 1) / kColumns;
  if (y.numel() == 0) return;
  DispatchDtype(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    AddColumnSumsKernel<<<blocks, dim3(kColumns, kRows), 0, CurrentStream()>>>(
        y.numel() / width, width, Data<T>(y), Data<Accumulator<T>>(sum));
  });
  BURST_CUDA_CHECK_LAUNCH("AddColumnSums");
}

}  // namespace cuda
}  // namespace burst
