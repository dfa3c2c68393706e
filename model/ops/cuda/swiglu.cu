#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// A thread's N elements of y, and of gate_up, where rows are twice as long.
template <int N>
struct Place {
  int64_t y, gate;
  __device__ Place(uint32_t index, int n)
      : y(index * int64_t{N}), gate(y + index / (n / N) * int64_t{n}) {}
};

// y = gate s up, s = sigmoid(gate)
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    SwiGluForwardKernel(int64_t count, int n, const T* __restrict__ gate_up, T* __restrict__ y) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= count) return;
  const Place<N> at(index, n);
  const Words<T, N> gate = Load<N>(gate_up + at.gate), up = Load<N>(gate_up + at.gate + n);
  Accumulator<T> out[N];
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = gate[j] * Sigmoid<T>(gate[j]) * up[j];
  StoreRounded<T, N>(out, y + at.y);
}

// dgate = dy up s (1 + gate (1 - s)), dup = dy gate s
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    SwiGluBackwardKernel(int64_t count, int n, const T* __restrict__ gate_up,
                         const T* __restrict__ dy, T* __restrict__ dgate_up) {
  using A = Accumulator<T>;
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= count) return;
  const Place<N> at(index, n);
  const Words<T, N> gate = Load<N>(gate_up + at.gate), up = Load<N>(gate_up + at.gate + n);
  const Words<T, N> grad = Load<N>(dy + at.y);
  A dgate[N], dup[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A g = gate[j], s = Sigmoid<T>(g), scaled = grad[j] * s;
    dgate[j] = scaled * up[j] * (1 + g * (1 - s));
    dup[j] = scaled * g;
  }
  StoreRounded<T, N>(dgate, dgate_up + at.gate);
  StoreRounded<T, N>(dup, dgate_up + at.gate + n);
}

}  // namespace

void SwiGluForward(const Tensor& gate_up, const Tensor& y) {
  if (y.numel() == 0) return;
  const int64_t n = y.dim(-1);
  DispatchVectors(y.dtype(), FitsVectors(n, {gate_up, y}), [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    const int64_t count = y.numel() / N;
    SwiGluForwardKernel<T, N><<<BlocksFor(count, kThreads), kThreads, 0, CurrentStream()>>>(
        count, static_cast<int>(n), Data<T>(gate_up), Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("SwiGluForward");
}

void SwiGluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up) {
  if (dy.numel() == 0) return;
  const int64_t n = dy.dim(-1);
  DispatchVectors(
      dy.dtype(), FitsVectors(n, {gate_up, dy, dgate_up}), [&](auto zero, auto vec_size) {
        using T = decltype(zero);
        constexpr int N = decltype(vec_size)::value;
        const int64_t count = dy.numel() / N;
        SwiGluBackwardKernel<T, N><<<BlocksFor(count, kThreads), kThreads, 0, CurrentStream()>>>(
            count, static_cast<int>(n), Data<T>(gate_up), Data<T>(dy), Data<T>(dgate_up));
      });
  BURST_CUDA_CHECK_LAUNCH("SwiGluBackward");
}

}  // namespace cuda
}  // namespace burst
