#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/packs.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Where a thread's N elements lie. Rows are [n] in y and [2 n] in gate_up.
struct Place {
  int64_t y, gate;
};
template <int N>
__device__ inline Place PlaceOf(int64_t index, int n) {
  const int64_t row = index / (n / N);
  const int64_t y = index * N;
  return {y, y + row * n};
}

// y = gate s up, s = sigmoid(gate)
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    SwiGluForwardKernel(int64_t count, int n, const T* __restrict__ gate_up, T* __restrict__ y) {
  using A = Accumulator<T>;
  const int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (index >= count) return;
  const Place place = PlaceOf<N>(index, n);
  A gate[N], up[N];
  Unpack<T, N>(*AsPacks<T, N>(gate_up + place.gate), gate);
  Unpack<T, N>(*AsPacks<T, N>(gate_up + place.gate + n), up);
#pragma unroll
  for (int j = 0; j < N; ++j) gate[j] *= up[j] * Sigmoid<T>(gate[j]);
  *AsPacks<T, N>(y + place.y) = ToPack<T, N>(gate);
}

// dgate = dy up s (1 + gate (1 - s)), dup = dy gate s
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    SwiGluBackwardKernel(int64_t count, int n, const T* __restrict__ gate_up,
                         const T* __restrict__ dy, T* __restrict__ dgate_up) {
  using A = Accumulator<T>;
  const int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (index >= count) return;
  const Place place = PlaceOf<N>(index, n);
  A gate[N], up[N], grad[N];
  Unpack<T, N>(*AsPacks<T, N>(gate_up + place.gate), gate);
  Unpack<T, N>(*AsPacks<T, N>(gate_up + place.gate + n), up);
  Unpack<T, N>(*AsPacks<T, N>(dy + place.y), grad);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A s = Sigmoid<T>(gate[j]), scaled = grad[j] * s;
    grad[j] = scaled * up[j] * (1 + gate[j] * (1 - s));
    up[j] = scaled * gate[j];
  }
  *AsPacks<T, N>(dgate_up + place.gate) = ToPack<T, N>(grad);
  *AsPacks<T, N>(dgate_up + place.gate + n) = ToPack<T, N>(up);
}

}  // namespace

void SwiGluForward(const Tensor& gate_up, const Tensor& y) {
  if (y.numel() == 0) return;
  const int64_t n = y.dim(-1);
  DispatchPacks(y.dtype(), FitsPacks(n, {gate_up, y}), [&](auto zero, auto pack) {
    using T = decltype(zero);
    constexpr int N = decltype(pack)::value;
    const int64_t count = y.numel() / N;
    SwiGluForwardKernel<T, N><<<BlocksFor(count, kThreads), kThreads, 0, CurrentStream()>>>(
        count, static_cast<int>(n), Data<T>(gate_up), Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("SwiGluForward");
}

void SwiGluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up) {
  if (dy.numel() == 0) return;
  const int64_t n = dy.dim(-1);
  DispatchPacks(dy.dtype(), FitsPacks(n, {gate_up, dy, dgate_up}), [&](auto zero, auto pack) {
    using T = decltype(zero);
    constexpr int N = decltype(pack)::value;
    const int64_t count = dy.numel() / N;
    SwiGluBackwardKernel<T, N><<<BlocksFor(count, kThreads), kThreads, 0, CurrentStream()>>>(
        count, static_cast<int>(n), Data<T>(gate_up), Data<T>(dy), Data<T>(dgate_up));
  });
  BURST_CUDA_CHECK_LAUNCH("SwiGluBackward");
}

}  // namespace cuda
}  // namespace burst
