#include <cuda_pipeline.h>

#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/kernels.h"

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

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline double Exp2(double x) { return exp2(x); }

template <typename A>
constexpr A kLog2E = A(1.4426950408889634);

template <typename T>
using Word = Vec<T, kVecSize<T>>;

// Returns word i of a row of logits. Columns past the vocabulary are -inf: exponentials of 0.
template <typename T>
__device__ inline Word<T> LoadLogits(const Word<T>* row, int i, int vocab) {
  Word<T> word = row[i];
  const int valid = vocab - i * kVecSize<T>;
  if (valid < kVecSize<T>) {
#pragma unroll
    for (int j = 0; j < kVecSize<T>; ++j) {
      if (j >= valid) word[j] = ConvertTo<T>(Accumulator<T>(-INFINITY));
    }
  }
  return word;
}

// Computes the loss of a row with a logsumexp of lse and a target whose score is `picked`, and its
// gradient. kChanged: there is a z or a softcap (LossTerms). Scores are logits after the softcap.
template <typename A, bool kChanged>
struct Loss {
  A scale, z, cap;

  explicit Loss(const LossTerms& terms)
      : scale(static_cast<A>(terms.scale)),
        z(static_cast<A>(terms.z)),
        cap(static_cast<A>(terms.softcap)) {}

  __device__ A Score(A logit) const {
    return kChanged && cap > 0 && logit > -INFINITY ? cap * tanh(logit / cap) : logit;
  }
  __device__ A Of(A lse, A picked) const {
    return kChanged ? lse - picked + z * lse * lse : lse - picked;
  }
  // Returns the factor of a score's gradient to its softmax, without the scale.
  __device__ A SoftmaxFactor(A lse) const { return kChanged ? 1 + 2 * z * lse : A(1); }
  // Returns a logit's gradient from its score's.
  __device__ A OfLogit(A gradient, A score) const {
    if (!kChanged || cap == 0 || score == -INFINITY) return gradient;
    return gradient * (1 - (score / cap) * (score / cap));
  }
};

// Returns the gradient for word i of a row: scale (factor exp(score - max) / sum - onehot(target)),
// times the softcap's slope. factor = SoftmaxFactor, log_factor = log2(scale / sum).
template <typename T, typename A, bool kChanged>
__device__ inline Word<T> Gradient(const Loss<A, kChanged>& loss, Word<T> word, int i, int target,
                                   A max, A log_factor, A factor) {
  A values[kVecSize<T>], scores[kVecSize<T>];
#pragma unroll
  for (int j = 0; j < kVecSize<T>; ++j) {
    scores[j] = loss.Score(ConvertTo<A>(word[j]));
    values[j] = Exp2(fma(scores[j] - max, kLog2E<A>, log_factor));
    if (kChanged) values[j] *= factor;
  }
  if (i == target / kVecSize<T>) {
#pragma unroll
    for (int j = 0; j < kVecSize<T>; ++j) {
      if (j == target % kVecSize<T>) values[j] -= loss.scale;
    }
  }
#pragma unroll
  for (int j = 0; j < kVecSize<T>; ++j) word[j] = ConvertTo<T>(loss.OfLogit(values[j], scores[j]));
  return word;
}

// Serves any vocabulary, with or without gradients. One block takes a row and reads it twice, the
// second time from the L2 cache.
template <typename T, bool kChanged>
__global__ void __launch_bounds__(kThreads)
    SoftmaxCrossEntropyKernel(int vocab, int64_t stride, const int32_t* __restrict__ targets,
                              Loss<Accumulator<T>, kChanged> loss, bool gradient, T* logits,
                              Accumulator<T>* losses) {
  using A = Accumulator<T>;
  constexpr int kVec = kVecSize<T>;
  const int64_t row = blockIdx.x;
  const int32_t target = targets[row];
  T* const x = logits + row * stride;
  Word<T>* const words = reinterpret_cast<Word<T>*>(x);
  const int count = static_cast<int>(stride / kVec);
  if (target < 0) {
    if (threadIdx.x == 0) losses[row] = 0;
    for (int i = threadIdx.x; gradient && i < count; i += kThreads) words[i] = Word<T>{};
    return;
  }
  if (target >= vocab) __trap();
  const A picked = loss.Score(ConvertTo<A>(x[target]));

  SoftmaxSum<A> own = {-INFINITY, 0};
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Word<T> word = LoadLogits<T>(words, i, vocab);
    A scores[kVec];
    A max = own.max;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      scores[j] = loss.Score(ConvertTo<A>(word[j]));
      max = fmax(max, scores[j]);
    }
    if (max == -INFINITY) continue;
    own.sum *= Exp2(kLog2E<A> * (own.max - max));
    own.max = max;
#pragma unroll
    for (int j = 0; j < kVec; ++j) own.sum += Exp2(kLog2E<A> * (scores[j] - max));
  }
  using Reduce = cub::BlockReduce<SoftmaxSum<A>, kThreads>;
  __shared__ typename Reduce::TempStorage storage;
  __shared__ SoftmaxSum<A> shared_sum;
  const SoftmaxSum<A> whole = Reduce(storage).Reduce(
      own, [](const SoftmaxSum<A>& a, const SoftmaxSum<A>& b) { return Merge(a, b); });
  if (threadIdx.x == 0) {
    shared_sum = whole;
    losses[row] = loss.Of(log(whole.sum) + whole.max, picked);
  }
  __syncthreads();  // and all threads have read `picked`
  if (!gradient) return;
  const A max = shared_sum.max, log_factor = log2(loss.scale / shared_sum.sum);
  const A factor = loss.SoftmaxFactor(log(shared_sum.sum) + max);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    words[i] =
        Gradient<T>(loss, LoadLogits<T>(words, i, vocab), i, target, max, log_factor, factor);
  }
}

// Serves gradients of long rows that fit in shared memory twice. There is one block for each
// multiprocessor. It takes row after row, and loads the next one while it computes this one. Every
// thread works on the words that it loaded itself.
constexpr int kStagedThreads = 1024;

// Combines the values of all threads. `shared` has an element for each warp.
template <typename A, typename Combine>
__device__ inline A OverBlock(A value, A* shared, Combine combine) {
  constexpr unsigned kAll = ~0u;
  for (int lane = 16; lane > 0; lane /= 2) {
    value = combine(value, __shfl_xor_sync(kAll, value, lane));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[threadIdx.x % 32];
  for (int lane = 16; lane > 0; lane /= 2) {
    value = combine(value, __shfl_xor_sync(kAll, value, lane));
  }
  return value;
}

template <typename T, bool kChanged>
__global__ void __launch_bounds__(kStagedThreads, 1)
    StagedSoftmaxCrossEntropyKernel(int64_t rows, int vocab, int64_t stride,
                                    const int32_t* __restrict__ targets,
                                    Loss<Accumulator<T>, kChanged> loss, T* logits,
                                    Accumulator<T>* losses) {
  using A = Accumulator<T>;
  constexpr int kVec = kVecSize<T>, kWarps = kStagedThreads / 32;
  static_assert(kWarps == 32, "OverBlock reads a value a lane");
  extern __shared__ uint4 staged[];
  // Each is read before the barrier of the other, and therefore before it is written again.
  __shared__ A maxima[kWarps], sums[kWarps];
  const int count = static_cast<int>(stride / kVec);
  const auto words_of = [&](int64_t row) {
    return reinterpret_cast<Word<T>*>(logits + row * stride);
  };
  const auto fetch = [&](int64_t row, int turn) {
    if (row < rows) {
      const Word<T>* const from = words_of(row);
      for (int i = threadIdx.x; i < count; i += kStagedThreads) {
        __pipeline_memcpy_async(staged + turn * count + i, from + i, 16);
      }
    }
    __pipeline_commit();
  };

  int turn = 0;
  fetch(blockIdx.x, turn);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    fetch(row + gridDim.x, turn ^ 1);
    __pipeline_wait_prior(1);
    const Word<T>* const x = reinterpret_cast<const Word<T>*>(staged + turn * count);
    Word<T>* const words = words_of(row);
    const int32_t target = targets[row];
    if (target < 0) {
      if (threadIdx.x == 0) losses[row] = 0;
      for (int i = threadIdx.x; i < count; i += kStagedThreads) words[i] = Word<T>{};
      continue;
    }
    if (target >= vocab) __trap();

    A max = -INFINITY;
    for (int i = threadIdx.x; i < count; i += kStagedThreads) {
      const Word<T> word = LoadLogits<T>(x, i, vocab);
      for (int j = 0; j < kVec; ++j) max = fmax(max, loss.Score(ConvertTo<A>(word[j])));
    }
    max = OverBlock(max, maxima, [](A a, A b) { return fmax(a, b); });
    A sum = 0;
    for (int i = threadIdx.x; i < count; i += kStagedThreads) {
      const Word<T> word = LoadLogits<T>(x, i, vocab);
      for (int j = 0; j < kVec; ++j) {
        sum += Exp2(kLog2E<A> * (loss.Score(ConvertTo<A>(word[j])) - max));
      }
    }
    sum = OverBlock(sum, sums, [](A a, A b) { return a + b; });
    const A lse = log(sum) + max, log_factor = log2(loss.scale / sum);
    const A factor = loss.SoftmaxFactor(lse);
    if (threadIdx.x == target / kVec % kStagedThreads) {
      losses[row] = loss.Of(lse, loss.Score(ConvertTo<A>(x[target / kVec][target % kVec])));
    }
    for (int i = threadIdx.x; i < count; i += kStagedThreads) {
      words[i] = Gradient<T>(loss, LoadLogits<T>(x, i, vocab), i, target, max, log_factor, factor);
    }
  }
}

constexpr int kSumThreads = 1024;

// One block sums; its threads load several losses at once, because no other kernel runs then.
template <typename A>
__global__ void __launch_bounds__(kSumThreads)
    SumLossesKernel(int64_t n, const A* __restrict__ losses, double scale, A* total) {
  constexpr int kLoads = 8;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kLoads * kSumThreads) {
    A in[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t at = i + j * kSumThreads;
      in[j] = at < n ? losses[at] : A(0);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum += in[j];
  }
  using Reduce = cub::BlockReduce<double, kSumThreads>;
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

// Sets y[i] = f x[i], or y[i] += f x[i], for `vecs` vectors of N.
template <typename T, int N>
__global__ void ScaleIntoKernel(int64_t vecs, const T* __restrict__ factor, const T* __restrict__ x,
                                bool add, T* y) {
  const T f = *factor;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < vecs;
       i += int64_t{gridDim.x} * blockDim.x) {
    const auto in = reinterpret_cast<const Vec<T, N>*>(x)[i];
    Vec<T, N> before, out;
    if (add) before = reinterpret_cast<const Vec<T, N>*>(y)[i];
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = add ? before[j] + f * in[j] : f * in[j];
    reinterpret_cast<Vec<T, N>*>(y)[i] = out;
  }
}

template <typename T>
void LaunchScaleInto(int64_t n, const T* factor, const T* x, bool add, T* y) {
  constexpr int N = kVecSize<T>;
  const auto aligned = [](const T* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  if (n % N == 0 && aligned(x) && aligned(y)) {
    ScaleIntoKernel<T, N>
        <<<GridSize(n / N, 256), 256, 0, CurrentStream()>>>(n / N, factor, x, add, y);
  } else {
    ScaleIntoKernel<T, 1><<<GridSize(n, 256), 256, 0, CurrentStream()>>>(n, factor, x, add, y);
  }
  BURST_CUDA_CHECK_LAUNCH("ScaleInto");
}

}  // namespace

namespace {

// Returns the shared memory that a block may have, less what the kernels declare themselves.
size_t SharedBytes() {
  int bytes = 0;
  BURST_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          CurrentContext().device));
  return bytes - 1024;
}

template <typename T, bool kChanged>
void LaunchSoftmaxCrossEntropy(const Tensor& logits, int64_t rows, int64_t vocab, int64_t stride,
                               const int32_t* targets, const LossTerms& terms, bool gradient,
                               void* losses) {
  using A = Accumulator<T>;
  const Loss<A, kChanged> loss(terms);
  const size_t both_rows = 2 * stride * sizeof(T);
  if (gradient && stride >= 2 * kStagedThreads * kVecSize<T> && both_rows <= SharedBytes()) {
    const auto kernel = StagedSoftmaxCrossEntropyKernel<T, kChanged>;
    BURST_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(both_rows)));
    const int64_t blocks = std::min<int64_t>(rows, CurrentContext().multiprocessors);
    kernel<<<blocks, kStagedThreads, both_rows, CurrentStream()>>>(
        rows, static_cast<int>(vocab), stride, targets, loss, Data<T>(logits),
        static_cast<A*>(losses));
  } else {
    SoftmaxCrossEntropyKernel<T, kChanged><<<rows, kThreads, 0, CurrentStream()>>>(
        static_cast<int>(vocab), stride, targets, loss, gradient, Data<T>(logits),
        static_cast<A*>(losses));
  }
}

}  // namespace

void SoftmaxCrossEntropy(const Tensor& logits, int64_t rows, int64_t vocab, int64_t stride,
                         const int32_t* targets, const LossTerms& terms, bool gradient,
                         void* losses) {
  if (rows == 0) return;
  BURST_CHECK_EQ(stride * SizeOf(logits.dtype()) % 16, 0);
  BURST_CHECK(!gradient || terms.scale > 0) << "a scale of " << terms.scale;
  DispatchDtype(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto launch = terms.z != 0 || terms.softcap != 0 ? LaunchSoftmaxCrossEntropy<T, true>
                                                           : LaunchSoftmaxCrossEntropy<T, false>;
    launch(logits, rows, vocab, stride, targets, terms, gradient, losses);
  });
  BURST_CUDA_CHECK_LAUNCH("SoftmaxCrossEntropy");
}

void SumLosses(const Tensor& losses, double scale, const Tensor& total) {
  if (losses.dtype() == DType::kFloat64) {
    SumLossesKernel<<<1, kSumThreads, 0, CurrentStream()>>>(losses.numel(), Data<double>(losses),
                                                            scale, Data<double>(total));
  } else {
    SumLossesKernel<<<1, kSumThreads, 0, CurrentStream()>>>(losses.numel(), Data<float>(losses),
                                                            scale, Data<float>(total));
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

void ScaleInto(const Tensor& y, const Tensor& x, const Tensor& factor, bool add) {
  const int64_t n = y.numel();
  if (n == 0) return;
  BURST_CHECK(y.dtype() == x.dtype() && y.dtype() == factor.dtype());
  if (y.dtype() == DType::kFloat64) {
    LaunchScaleInto(n, Data<double>(factor), Data<double>(x), add, Data<double>(y));
  } else {
    LaunchScaleInto(n, Data<float>(factor), Data<float>(x), add, Data<float>(y));
  }
}

}  // namespace cuda
}  // namespace burst
