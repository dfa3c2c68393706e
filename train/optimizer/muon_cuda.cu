#include <cstdint>

#include "burst/tensor/dispatch.cuh"
#include "train/optimizer/muon_cuda.h"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__device__ inline bool IsFinite(const double* loss_and_norm) {
  return isfinite(loss_and_norm[0]) && isfinite(loss_and_norm[1]);
}

// Calls body(i) for all i below n, over the grid.
template <typename Body>
__device__ inline void ForAll(int64_t n, const Body& body) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * kThreads) {
    body(i);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    DirectionKernel(int64_t n, T momentum, T rest, const T* __restrict__ grad_scale,
                    const double* __restrict__ loss_and_norm, const T* __restrict__ g, T* m, T* u) {
  if (!IsFinite(loss_and_norm)) return;
  const T scale = *grad_scale;
  ForAll(n, [&](int64_t i) {
    const T gradient = rest * (g[i] * scale);
    m[i] = fma(momentum, m[i], gradient);
    u[i] = fma(momentum, m[i], gradient);
  });
}

template <typename T, typename X>
__global__ void __launch_bounds__(kThreads)
    DivideKernel(int64_t n, const T* __restrict__ u, const double* __restrict__ norm, X* x) {
  const T scale = *norm == 0 ? T(0) : T(1 / *norm);
  ForAll(n, [&](int64_t i) { x[i] = ConvertTo<X>(u[i] * scale); });
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    AddScaledKernel(int64_t n, Accumulator<T> a, T* y, Accumulator<T> b, const T* __restrict__ x) {
  using A = Accumulator<T>;
  ForAll(n,
         [&](int64_t i) { y[i] = ConvertTo<T>(a * ConvertTo<A>(y[i]) + b * ConvertTo<A>(x[i])); });
}

template <typename T, typename X>
__global__ void __launch_bounds__(kThreads)
    ApplyKernel(int64_t n, T keep, T step, const double* __restrict__ loss_and_norm,
                const X* __restrict__ x, T* p, bf16* compute) {
  if (!IsFinite(loss_and_norm)) return;
  ForAll(n, [&](int64_t i) {
    p[i] = fma(keep, p[i], -(step * ConvertTo<T>(x[i])));
    if (compute != nullptr) compute[i] = ConvertTo<bf16>(p[i]);
  });
}

// Calls body(a zero of the weights' type, a zero of x's type).
template <typename Body>
void Dispatch(const Tensor& weights, const Tensor& x, const Body& body) {
  DispatchFloat(weights.dtype(), [&](auto zero) {
    if (x.dtype() == DType::kBFloat16) {
      body(zero, bf16());
    } else {
      body(zero, zero);
    }
  });
}

}  // namespace

void MuonDirection(double momentum, const Tensor& grad_scale, const Tensor& loss_and_norm,
                   const Tensor& g, const Tensor& m, const Tensor& u) {
  DispatchFloat(m.dtype(), [&](auto zero) {
    using T = decltype(zero);
    DirectionKernel<T><<<GridSize(m.numel(), kThreads), kThreads, 0, CurrentStream()>>>(
        m.numel(), static_cast<T>(momentum), static_cast<T>(1 - momentum), Data<T>(grad_scale),
        Data<double>(loss_and_norm), Data<T>(g), Data<T>(m), Data<T>(u));
  });
  BURST_CUDA_CHECK_LAUNCH("MuonDirection");
}

void DivideByNorm(const Tensor& u, const Tensor& norm, const Tensor& x) {
  Dispatch(u, x, [&](auto zero, auto of_x) {
    using T = decltype(zero);
    using X = decltype(of_x);
    DivideKernel<T, X><<<GridSize(u.numel(), kThreads), kThreads, 0, CurrentStream()>>>(
        u.numel(), Data<T>(u), Data<double>(norm), Data<X>(x));
  });
  BURST_CUDA_CHECK_LAUNCH("DivideByNorm");
}

void AddScaled(double a, const Tensor& y, double b, const Tensor& x) {
  DispatchDtype(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using A = Accumulator<T>;
    AddScaledKernel<T><<<GridSize(y.numel(), kThreads), kThreads, 0, CurrentStream()>>>(
        y.numel(), static_cast<A>(a), Data<T>(y), static_cast<A>(b), Data<T>(x));
  });
  BURST_CUDA_CHECK_LAUNCH("AddScaled");
}

void ApplyMuon(double keep, double step, const Tensor& loss_and_norm, const Tensor& x,
               const Tensor& p, const Tensor& compute) {
  Dispatch(p, x, [&](auto zero, auto of_x) {
    using T = decltype(zero);
    using X = decltype(of_x);
    ApplyKernel<T, X><<<GridSize(p.numel(), kThreads), kThreads, 0, CurrentStream()>>>(
        p.numel(), static_cast<T>(keep), static_cast<T>(step), Data<double>(loss_and_norm),
        Data<X>(x), Data<T>(p), Data<bf16>(compute));
  });
  BURST_CUDA_CHECK_LAUNCH("ApplyMuon");
}

}  // namespace cuda
}  // namespace burst
