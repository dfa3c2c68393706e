// Computes elementwise ops: sums, factors, activations and gates.
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVecs = 2;  // vectors of a thread, both loaded before one is used

// Sets y[i] = Op(a[i], b[i]), or Op(a[i]) where b is null.
template <typename T, int N, bool kTwo, typename Op>
__global__ void __launch_bounds__(kThreads) MapKernel(int64_t n, Op op, const T* __restrict__ a,
                                                      const T* __restrict__ b, T* __restrict__ y) {
  using A = Accumulator<T>;
  const int64_t first = blockIdx.x * int64_t{kThreads * kVecs} + threadIdx.x;
  Words<T, N> in_a[kVecs], in_b[kVecs];
#pragma unroll
  for (int p = 0; p < kVecs; ++p) {
    const int64_t at = (first + p * kThreads) * N;
    if (at + N > n) continue;
    in_a[p] = Load<N>(a + at);
    if (kTwo) in_b[p] = Load<N>(b + at);
  }
#pragma unroll
  for (int p = 0; p < kVecs; ++p) {
    const int64_t at = (first + p * kThreads) * N;
    if (at + N <= n) {
      A out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        out[j] = op.template Apply<T>(in_a[p][j], kTwo ? in_b[p][j] : A(0));
      }
      StoreRounded<T, N>(out, y + at);
    } else {  // the end, when N does not divide n
      for (int64_t i = at; i < n; ++i) {
        y[i] = ConvertTo<T>(
            op.template Apply<T>(ConvertTo<A>(a[i]), kTwo ? ConvertTo<A>(b[i]) : A(0)));
      }
    }
  }
}

template <bool kTwo, typename Op>
void Map(Op op, const Tensor& a, const Tensor& b, const Tensor& y) {
  const int64_t n = y.numel();
  if (n == 0) return;
  // The kernel handles the elements left over at the end, so any width is allowed.
  DispatchVectors(y.dtype(), FitsVectors(16, {a, b, y}), [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    MapKernel<T, N, kTwo, Op>
        <<<BlocksFor((n + N - 1) / N, kThreads * kVecs), kThreads, 0, CurrentStream()>>>(
            n, op, Data<T>(a), Data<T>(b), Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("Map");
}

// The activations of model/ops/elementwise.cc: f(x) = x sigmoid(u(x)), with u's slope u'.
struct SiluGate {
  template <typename A>
  __device__ static A U(A x) {
    return x;
  }
  template <typename A>
  __device__ static A Slope(A) {
    return A(1);
  }
};

struct GeluGate {
  static constexpr double kA = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kB = 0.044715 * kA;
  template <typename A>
  __device__ static A U(A x) {
    return x * (A(kA) + A(kB) * x * x);
  }
  template <typename A>
  __device__ static A Slope(A x) {
    return A(kA) + A(3 * kB) * x * x;
  }
};

struct GeluOp {
  template <typename T, typename A>
  __device__ A Apply(A x, A) const {
    return x * Sigmoid<T>(GeluGate::U(x));
  }
};

// dx = dy s (1 + x (1 - s) u')
struct GeluBackwardOp {
  template <typename T, typename A>
  __device__ A Apply(A x, A dy) const {
    const A s = Sigmoid<T>(GeluGate::U(x));
    return dy * s * (1 + x * (1 - s) * GeluGate::Slope(x));
  }
};

struct ScaleOp {
  double factor;
  template <typename T, typename A>
  __device__ A Apply(A x, A) const {
    return A(factor) * x;
  }
};

struct SoftCapOp {
  double cap;
  template <typename T, typename A>
  __device__ A Apply(A x, A) const {
    return A(cap) * tanh(x / A(cap));
  }
};

struct SoftCapBackwardOp {
  double cap;
  template <typename T, typename A>
  __device__ A Apply(A y, A dy) const {
    return dy * (1 - (y / A(cap)) * (y / A(cap)));
  }
};

struct AddOp {
  template <typename T, typename A>
  __device__ A Apply(A a, A b) const {
    return a + b;
  }
};

}  // namespace

void GeluForward(const Tensor& x, const Tensor& y) { Map<false>(GeluOp(), x, Tensor(), y); }

void GeluBackward(const Tensor& x, const Tensor& dy, const Tensor& dx) {
  Map<true>(GeluBackwardOp(), x, dy, dx);
}

void SoftCapForward(const Tensor& x, double cap, const Tensor& y) {
  Map<false>(SoftCapOp{cap}, x, Tensor(), y);
}

void SoftCapBackward(const Tensor& y, const Tensor& dy, double cap, const Tensor& dx) {
  Map<true>(SoftCapBackwardOp{cap}, y, dy, dx);
}

void AddForward(const Tensor& a, const Tensor& b, const Tensor& y) { Map<true>(AddOp(), a, b, y); }

void ScaleForward(const Tensor& x, double factor, const Tensor& y) {
  Map<false>(ScaleOp{factor}, x, Tensor(), y);
}

// ---- SwiGLU and GEGLU.

namespace {

// The places of a thread's N elements of y, and of gate_up, whose rows are twice as long.
template <int N>
struct Place {
  int64_t y, gate;
  __device__ Place(uint32_t index, int n)
      : y(index * int64_t{N}), gate(y + index / (n / N) * int64_t{n}) {}
};

// y = gate s up, s = sigmoid(u(gate))
template <typename Gate, typename T, int N>
__global__ void __launch_bounds__(kThreads)
    GluForwardKernel(int64_t count, int n, const T* __restrict__ gate_up, T* __restrict__ y) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= count) return;
  const Place<N> at(index, n);
  const Words<T, N> gate = Load<N>(gate_up + at.gate), up = Load<N>(gate_up + at.gate + n);
  Accumulator<T> out[N];
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = gate[j] * Sigmoid<T>(Gate::U(gate[j])) * up[j];
  StoreRounded<T, N>(out, y + at.y);
}

// dgate = dy up s (1 + gate (1 - s) u'), dup = dy gate s
template <typename Gate, typename T, int N>
__global__ void __launch_bounds__(kThreads)
    GluBackwardKernel(int64_t count, int n, const T* __restrict__ gate_up, const T* __restrict__ dy,
                      T* __restrict__ dgate_up) {
  using A = Accumulator<T>;
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= count) return;
  const Place<N> at(index, n);
  const Words<T, N> gate = Load<N>(gate_up + at.gate), up = Load<N>(gate_up + at.gate + n);
  const Words<T, N> grad = Load<N>(dy + at.y);
  A dgate[N], dup[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A g = gate[j], s = Sigmoid<T>(Gate::U(g)), scaled = grad[j] * s;
    dgate[j] = scaled * up[j] * (1 + g * (1 - s) * Gate::Slope(g));
    dup[j] = scaled * g;
  }
  StoreRounded<T, N>(dgate, dgate_up + at.gate);
  StoreRounded<T, N>(dup, dgate_up + at.gate + n);
}

template <typename Gate>
void GluForward(const Tensor& gate_up, const Tensor& y) {
  if (y.numel() == 0) return;
  const int64_t n = y.dim(-1);
  DispatchVectors(y.dtype(), FitsVectors(n, {gate_up, y}), [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    const int64_t count = y.numel() / N;
    GluForwardKernel<Gate, T, N><<<BlocksFor(count, kThreads), kThreads, 0, CurrentStream()>>>(
        count, static_cast<int>(n), Data<T>(gate_up), Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("GluForward");
}

template <typename Gate>
void GluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up) {
  if (dy.numel() == 0) return;
  const int64_t n = dy.dim(-1);
  DispatchVectors(
      dy.dtype(), FitsVectors(n, {gate_up, dy, dgate_up}), [&](auto zero, auto vec_size) {
        using T = decltype(zero);
        constexpr int N = decltype(vec_size)::value;
        const int64_t count = dy.numel() / N;
        GluBackwardKernel<Gate, T, N><<<BlocksFor(count, kThreads), kThreads, 0, CurrentStream()>>>(
            count, static_cast<int>(n), Data<T>(gate_up), Data<T>(dy), Data<T>(dgate_up));
      });
  BURST_CUDA_CHECK_LAUNCH("GluBackward");
}

}  // namespace

void SwiGluForward(const Tensor& gate_up, const Tensor& y) { GluForward<SiluGate>(gate_up, y); }

void SwiGluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up) {
  GluBackward<SiluGate>(gate_up, dy, dgate_up);
}

void GeGluForward(const Tensor& gate_up, const Tensor& y) { GluForward<GeluGate>(gate_up, y); }

void GeGluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up) {
  GluBackward<GeluGate>(gate_up, dy, dgate_up);
}

}  // namespace cuda
}  // namespace burst
