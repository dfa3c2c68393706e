#include <cuda_pipeline.h>

#include <cub/block/block_reduce.cuh>
#include <limits>

#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/cross_entropy.h"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 512;

// The largest element so far, and the sum of exp(element - max).
template <typename A>
struct SoftmaxSum {
  A max;
  A sum;
};

template <typename A>
__device__ SoftmaxSum<A> Merge(SoftmaxSum<A> a, SoftmaxSum<A> b) {
  const A max = a.max > b.max ? a.max : b.max;
  if (max == -INFINITY) return a;
  return {max, a.sum * exp(a.max - max) + b.sum * exp(b.max - max)};
}

__device__ inline float Exp(float x) { return __expf(x); }
__device__ inline double Exp(double x) { return exp(x); }

// The longest row that a block keeps in shared memory: two blocks to a multiprocessor, so that
// one's transfers run beside the other's arithmetic.
constexpr size_t kStagedBytes = size_t{112} << 10;

// One block a row. Each thread reads its words twice: from shared memory when kStaged, where it put
// them itself, else again from the L2 cache.
template <typename T, bool kStaged>
__global__ void __launch_bounds__(kThreads)
    SoftmaxCrossEntropyKernel(int64_t vocab, int64_t stride, const int32_t* __restrict__ targets,
                              Accumulator<T> scale, bool gradient, T* logits,
                              Accumulator<T>* losses) {
  using A = Accumulator<T>;
  constexpr int kPack = kPackSize<T>;
  using Word = Pack<T, kPack>;
  const int64_t row = blockIdx.x;
  const int32_t target = targets[row];
  T* const x = logits + row * stride;
  Word* const words = reinterpret_cast<Word*>(x);
  const int64_t count = stride / kPack;
  if (target < 0) {
    if (threadIdx.x == 0) losses[row] = 0;
    if (!gradient) return;
    Word zero;
    for (int j = 0; j < kPack; ++j) zero[j] = ConvertTo<T>(A{0});
    for (int64_t i = threadIdx.x; i < count; i += kThreads) words[i] = zero;
    return;
  }
  if (target >= vocab) __trap();
  extern __shared__ uint4 staged[];
  const Word* const source = kStaged ? reinterpret_cast<const Word*>(staged) : words;
  if constexpr (kStaged) {
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      __pipeline_memcpy_async(staged + i, words + i, 16);
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
  }
  const A picked = ConvertTo<A>(x[target]);

  SoftmaxSum<A> own = {-INFINITY, 0};
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const Word word = source[i];
    A values[kPack], max = -INFINITY;
    for (int j = 0; j < kPack; ++j) {
      values[j] = i * kPack + j < vocab ? ConvertTo<A>(word[j]) : A{-INFINITY};
      max = values[j] > max ? values[j] : max;
    }
    if (max > own.max) {
      own.sum *= Exp(own.max - max);
      own.max = max;
    }
    // own.max is -inf only while every value was
    if (own.max != -INFINITY) {
      for (int j = 0; j < kPack; ++j) own.sum += Exp(values[j] - own.max);
    }
  }
  using Reduce = cub::BlockReduce<SoftmaxSum<A>, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ SoftmaxSum<A> whole;
  const SoftmaxSum<A> reduced = Reduce(storage).Reduce(
      own, [](const SoftmaxSum<A>& a, const SoftmaxSum<A>& b) { return Merge(a, b); });
  if (threadIdx.x == 0) {
    whole = reduced;
    losses[row] = log(reduced.sum) + reduced.max - picked;
  }
  __syncthreads();  // and everybody has read `picked`
  if (!gradient) return;

  // scale (exp(x - max) / sum - onehot)
  const A max = whole.max, factor = scale / whole.sum;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    Word word = source[i];
    for (int j = 0; j < kPack; ++j) {
      const int64_t column = i * kPack + j;
      A value = column < vocab ? Exp(ConvertTo<A>(word[j]) - max) * factor : A{0};
      if (column == target) value -= scale;
      word[j] = ConvertTo<T>(value);
    }
    words[i] = word;
  }
}

template <typename A>
__global__ void SumLossesKernel(int64_t n, const A* __restrict__ losses, double scale, A* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += losses[i];
  using Reduce = cub::BlockReduce<double, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  sum = Reduce(storage).Sum(sum);
  if (threadIdx.x == 0) *total = static_cast<A>(scale * sum);
}

template <typename T>
__global__ void ScaleByKernel(int64_t n, const Accumulator<T>* factor, T* y) {
  const Accumulator<T> f = *factor;
  if (f == 1) return;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    y[i] = ConvertTo<T>(ConvertTo<Accumulator<T>>(y[i]) * f);
  }
}

template <typename T>
__global__ void AddScaledKernel(int64_t n, const T* __restrict__ factor, const T* __restrict__ x,
                                T* y) {
  const T f = *factor;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    y[i] += f * x[i];
  }
}

}  // namespace

void SoftmaxCrossEntropy(const Tensor& logits, int64_t rows, int64_t vocab, int64_t stride,
                         const int32_t* targets, double scale, bool gradient, void* losses) {
  if (rows == 0) return;
  BURST_CHECK_EQ(stride * SizeOf(logits.dtype()) % 16, 0);
  DispatchDtype(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulator<T>;
    const size_t row_bytes = stride * sizeof(T);
    auto* kernel = SoftmaxCrossEntropyKernel<T, false>;
    size_t shared_bytes = 0;
    if (gradient && row_bytes <= kStagedBytes) {
      kernel = SoftmaxCrossEntropyKernel<T, true>;
      shared_bytes = row_bytes;
      BURST_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes)));
    }
    kernel<<<rows, kThreads, shared_bytes, CurrentStream()>>>(
        vocab, stride, targets, static_cast<A>(scale), gradient, Data<T>(logits),
        static_cast<A*>(losses));
  });
  BURST_CUDA_CHECK_LAUNCH("SoftmaxCrossEntropy");
}

void SumLosses(const Tensor& losses, double scale, const Tensor& total) {
  if (losses.dtype() == DType::kFloat64) {
    SumLossesKernel<<<1, kThreads, 0, CurrentStream()>>>(losses.numel(), Data<double>(losses),
                                                         scale, Data<double>(total));
  } else {
    SumLossesKernel<<<1, kThreads, 0, CurrentStream()>>>(losses.numel(), Data<float>(losses), scale,
                                                         Data<float>(total));
  }
  BURST_CUDA_CHECK_LAUNCH("SumLosses");
}

void ScaleBy(const Tensor& y, const Tensor& factor) {
  const int64_t n = y.numel();
  if (n == 0) return;
  DispatchDtype(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    ScaleByKernel<<<GridSize(n, 256), 256, 0, CurrentStream()>>>(n, Data<Accumulator<T>>(factor),
                                                                 Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("ScaleBy");
}

void AddScaled(const Tensor& y, const Tensor& x, const Tensor& factor) {
  const int64_t n = y.numel();
  if (n == 0) return;
  BURST_CHECK(y.dtype() == x.dtype() && y.dtype() == factor.dtype());
  if (y.dtype() == DType::kFloat64) {
    AddScaledKernel<<<GridSize(n, 256), 256, 0, CurrentStream()>>>(
        n, Data<double>(factor), Data<double>(x), Data<double>(y));
  } else {
    AddScaledKernel<<<GridSize(n, 256), 256, 0, CurrentStream()>>>(n, Data<float>(factor),
                                                                   Data<float>(x), Data<float>(y));
  }
  BURST_CUDA_CHECK_LAUNCH("AddScaled");
}

}  // namespace cuda
}  // namespace burst
