#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "burst/tensor/dispatch.cuh"
#include "train/optimizer/adamw_cuda.h"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVecsPerThread = 2;

template <typename T>
struct Flat {
  const T* grads;
  T* masters;
  T* m;
  T* v;
  bf16* compute;
};

// The formulas of train/optimizer/adamw.cc:
//   m <- beta1 m + (1 - beta1) g                v <- beta2 v + (1 - beta2) g^2
//   p <- (1 - lr lambda) p - lr m^ / (sqrt(v^) + eps),   m^ = m / (1 - beta1^t), v^ likewise
template <typename T>
struct Coefficients {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, sqrt_correct2, eps, keep, grad_scale;

  // The coefficients of update number t, counted from 1.
  __device__ Coefficients(const AdamWUpdate& update, double t, double norm)
      : beta1(update.beta1),
        one_minus_beta1(1 - update.beta1),
        beta2(update.beta2),
        one_minus_beta2(1 - update.beta2),
        step_size(update.lr / (1 - pow(update.beta1, t))),
        sqrt_correct2(1 / sqrt(1 - pow(update.beta2, t))),
        eps(update.eps),
        keep(1 - update.lr * update.weight_decay),
        grad_scale(update.clip > 0 && norm > update.clip ? update.clip / norm : 1) {}

  __device__ void Update(T g, bool decays, T* p, T* m, T* v) const {
    g *= grad_scale;
    *m = beta1 * *m + one_minus_beta1 * g;
    *v = beta2 * *v + one_minus_beta2 * g * g;
    *p = (decays ? keep * *p : *p) - step_size * *m / (sqrt(*v) * sqrt_correct2 + eps);
  }
};

static_assert(offsetof(Coefficients<float>, grad_scale) == kGradScale * sizeof(float));

// Runs on one thread: counts the update, unless loss or norm is not finite, and computes its
// coefficients.
template <typename T>
__global__ void BeginUpdateKernel(AdamWUpdate update, const double* __restrict__ loss_and_norm,
                                  double* updates, Coefficients<T>* coefficients) {
  if (!isfinite(loss_and_norm[0]) || !isfinite(loss_and_norm[1])) return;
  *coefficients = Coefficients<T>(update, ++*updates, loss_and_norm[1]);
}

// Returns the number of bounds <= at; weights decay if it is odd.
__device__ inline int BoundsUpTo(const double* bounds, int count, double at) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (bounds[middle] <= at) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Updates a part whose first element is number `offset`, in vectors of N elements. A block takes
// kThreads kVecsPerThread consecutive vectors, nearly always on one side of the bounds.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    AdamWKernel(int64_t offset, int64_t n, const Coefficients<T>* __restrict__ update,
                const double* __restrict__ bounds, int num_bounds,
                const double* __restrict__ loss_and_norm, Flat<T> flat) {
  if (!isfinite(loss_and_norm[0]) || !isfinite(loss_and_norm[1])) return;
  const Coefficients<T> coefficients = *update;
  constexpr int64_t kBlock = int64_t{kThreads} * kVecsPerThread * N;
  const int64_t begin = blockIdx.x * kBlock;

  __shared__ int range[2];
  if (threadIdx.x < 2) {
    const int64_t at = threadIdx.x == 0 ? begin : min(n, begin + kBlock) - 1;
    range[threadIdx.x] = BoundsUpTo(bounds, num_bounds, static_cast<double>(offset + at));
  }
  __syncthreads();
  const int first_bound = range[0], last_bound = range[1];
  const auto decays = [&](int64_t i) {
    int bound = first_bound;
    while (bound < last_bound && bounds[bound] <= static_cast<double>(offset + i)) ++bound;
    return bound % 2 == 1;
  };

  Vec<T, N> g[kVecsPerThread], p[kVecsPerThread], m[kVecsPerThread], v[kVecsPerThread];
#pragma unroll
  for (int k = 0; k < kVecsPerThread; ++k) {
    const int64_t at = begin + (k * kThreads + threadIdx.x) * int64_t{N};
    if (at + N > n) continue;
    g[k] = *reinterpret_cast<const Vec<T, N>*>(flat.grads + at);
    p[k] = *reinterpret_cast<const Vec<T, N>*>(flat.masters + at);
    m[k] = *reinterpret_cast<const Vec<T, N>*>(flat.m + at);
    v[k] = *reinterpret_cast<const Vec<T, N>*>(flat.v + at);
  }
#pragma unroll
  for (int k = 0; k < kVecsPerThread; ++k) {
    const int64_t at = begin + (k * kThreads + threadIdx.x) * int64_t{N};
    if (at + N <= n) {
      Vec<bf16, N> compute;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        coefficients.Update(g[k][j], decays(at + j), &p[k][j], &m[k][j], &v[k][j]);
        compute[j] = ConvertTo<bf16>(p[k][j]);
      }
      *reinterpret_cast<Vec<T, N>*>(flat.masters + at) = p[k];
      *reinterpret_cast<Vec<T, N>*>(flat.m + at) = m[k];
      *reinterpret_cast<Vec<T, N>*>(flat.v + at) = v[k];
      if (flat.compute != nullptr) *reinterpret_cast<Vec<bf16, N>*>(flat.compute + at) = compute;
    } else {  // the end
      for (int64_t i = at; i < n; ++i) {
        coefficients.Update(flat.grads[i], decays(i), flat.masters + i, flat.m + i, flat.v + i);
        if (flat.compute != nullptr) flat.compute[i] = ConvertTo<bf16>(flat.masters[i]);
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    AverageKernel(int64_t n, double decay, const double* __restrict__ loss_and_norm,
                  const double* __restrict__ updates, const T* __restrict__ weights, T* average) {
  if (!isfinite(loss_and_norm[0]) || !isfinite(loss_and_norm[1])) return;
  if (*updates == 1) decay = 0;
  const T keep = decay, rest = 1 - decay;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * kThreads) {
    average[i] = fma(keep, average[i], rest * weights[i]);
  }
}

bool Aligned(const Tensor& tensor, int64_t bytes) {
  return tensor.null() || reinterpret_cast<uintptr_t>(tensor.raw_data()) % bytes == 0;
}

// Sums a value over a block, for thread 0, in a tree, whose order is fixed.
__device__ inline double BlockSum(double value) {
  __shared__ double shared[kThreads];
  shared[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  return shared[0];
}

// Sets sums[b] to the sum of squares of the block's share: vectors b kThreads + t, and so on over
// the grid.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    SquareSumKernel(int64_t n, const T* __restrict__ x, double* __restrict__ sums) {
  const int64_t vecs = n / N, step = int64_t{gridDim.x} * kThreads;
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  double partial[4] = {};  // sums that do not wait for each other
  constexpr int kVecs = 4;
  int64_t i = first;
  for (; i + (kVecs - 1) * step < vecs; i += kVecs * step) {
    Vec<T, N> in[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) in[k] = reinterpret_cast<const Vec<T, N>*>(x)[i + k * step];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const double value = ConvertTo<double>(in[k][j]);
        partial[k] += value * value;
      }
    }
  }
  for (; i < vecs; i += step) {
    const Vec<T, N> in = reinterpret_cast<const Vec<T, N>*>(x)[i];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const double value = ConvertTo<double>(in[j]);
      partial[0] += value * value;
    }
  }
  for (int64_t j = vecs * N + first; j < n; j += step) {
    const double value = ConvertTo<double>(x[j]);
    partial[0] += value * value;
  }
  const double sum = BlockSum((partial[0] + partial[1]) + (partial[2] + partial[3]));
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void RootOfSumKernel(int n, const double* __restrict__ sums, double* norm) {
  double partial = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) partial += sums[i];
  const double sum = BlockSum(partial);
  if (threadIdx.x == 0) *norm = sqrt(sum);
}

}  // namespace

void BeginAdamWStep(const AdamWUpdate& update, const Tensor& loss_and_norm, const Tensor& updates,
                    const Tensor& coefficients) {
  DispatchFloat(coefficients.dtype(), [&](auto zero) {
    using T = decltype(zero);
    static_assert(sizeof(Coefficients<T>) == kAdamWCoefficients * sizeof(T));
    BeginUpdateKernel<<<1, 1, 0, CurrentStream()>>>(
        update, Data<double>(loss_and_norm), Data<double>(updates),
        reinterpret_cast<Coefficients<T>*>(Data<T>(coefficients)));
    BURST_CUDA_CHECK_LAUNCH("BeginAdamWStep");
  });
}

void AdamWStep(const Tensor& coefficients, const Tensor& decay_bounds, const Tensor& loss_and_norm,
               const AdamWPart& part) {
  const int64_t n = part.masters.numel();
  if (n == 0) return;
  const auto launch = [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    constexpr int64_t kBlock = int64_t{kThreads} * kVecsPerThread * N;
    const Flat<T> flat = {Data<T>(part.grads), Data<T>(part.masters), Data<T>(part.m),
                          Data<T>(part.v), Data<bf16>(part.compute)};
    AdamWKernel<T, N><<<(n + kBlock - 1) / kBlock, kThreads, 0, CurrentStream()>>>(
        part.offset, n, reinterpret_cast<const Coefficients<T>*>(Data<T>(coefficients)),
        Data<double>(decay_bounds), static_cast<int>(decay_bounds.numel()),
        Data<double>(loss_and_norm), flat);
    BURST_CUDA_CHECK_LAUNCH("AdamWStep");
  };
  DispatchFloat(part.masters.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (Aligned(part.grads, 16) && Aligned(part.masters, 16) && Aligned(part.m, 16) &&
        Aligned(part.v, 16) && Aligned(part.compute, 8)) {
      launch(zero, std::integral_constant<int, kVecSize<T>>());
    } else {
      launch(zero, std::integral_constant<int, 1>());
    }
  });
}

void UpdateAverage(double decay, const Tensor& loss_and_norm, const Tensor& updates,
                   const Tensor& weights, const Tensor& average) {
  const int64_t n = weights.numel();
  if (n == 0) return;
  DispatchFloat(weights.dtype(), [&](auto zero) {
    using T = decltype(zero);
    AverageKernel<<<GridSize(n, kThreads), kThreads, 0, CurrentStream()>>>(
        n, decay, Data<double>(loss_and_norm), Data<double>(updates), Data<T>(weights),
        Data<T>(average));
  });
  BURST_CUDA_CHECK_LAUNCH("UpdateAverage");
}

void L2Norm(const Tensor& x, const Tensor& norm) {
  // A few waves of blocks, the same number on every GPU.
  constexpr int64_t kMaxBlocks = 2048, kElements = int64_t{kThreads} * 16;
  const int64_t n = x.numel();
  const int64_t blocks = std::clamp<int64_t>((n + kElements - 1) / kElements, 1, kMaxBlocks);
  const Tensor sums = Tensor::Empty({blocks}, DType::kFloat64, DeviceType::kCuda);
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = Aligned(x, 16) ? SquareSumKernel<T, kVecSize<T>> : SquareSumKernel<T, 1>;
    kernel<<<blocks, kThreads, 0, CurrentStream()>>>(n, Data<T>(x), Data<double>(sums));
  });
  BURST_CUDA_CHECK_LAUNCH("L2Norm");
  RootOfSumKernel<<<1, kThreads, 0, CurrentStream()>>>(static_cast<int>(blocks), Data<double>(sums),
                                                       Data<double>(norm));
  BURST_CUDA_CHECK_LAUNCH("L2Norm");
}

}  // namespace cuda
}  // namespace burst
