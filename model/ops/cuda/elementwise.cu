// Ops on elements one by one: GELU and the sum.
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVecs = 2;  // a thread's, both asked for before either is worked on

// y[i] = Op(a[i], b[i]), or Op(a[i]) where b is null.
template <typename T, int N, bool kTwo, typename Op>
__global__ void __launch_bounds__(kThreads)
    MapKernel(int64_t n, const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ y) {
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
        out[j] = Op::template Apply<T>(in_a[p][j], kTwo ? in_b[p][j] : A(0));
      }
      StoreRounded<T, N>(out, y + at);
    } else {  // the end, when n is no multiple of N
      for (int64_t i = at; i < n; ++i) {
        y[i] = ConvertTo<T>(
            Op::template Apply<T>(ConvertTo<A>(a[i]), kTwo ? ConvertTo<A>(b[i]) : A(0)));
      }
    }
  }
}

template <typename Op, bool kTwo>
void Map(const Tensor& a, const Tensor& b, const Tensor& y) {
  const int64_t n = y.numel();
  if (n == 0) return;
  // Elements left over at the end are no obstacle, hence a width of 16.
  DispatchVectors(y.dtype(), FitsVectors(16, {a, b, y}), [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    MapKernel<T, N, kTwo, Op>
        <<<BlocksFor((n + N - 1) / N, kThreads * kVecs), kThreads, 0, CurrentStream()>>>(
            n, Data<T>(a), Data<T>(b), Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("Map");
}

// As in gelu.cc: with 2 u = x (a + b x^2) and s = sigmoid(2 u), gelu(x) = x s.
constexpr double kA = 1.5957691216057308;  // 2 sqrt(2 / pi)
constexpr double kB = 0.044715 * kA;

struct GeluOp {
  template <typename T, typename A>
  static __device__ A Apply(A x, A) {
    return x * Sigmoid<T>(x * (A(kA) + A(kB) * x * x));
  }
};

// dx = dy s (1 + x (1 - s) (a + 3 b x^2))
struct GeluBackwardOp {
  template <typename T, typename A>
  static __device__ A Apply(A x, A dy) {
    const A s = Sigmoid<T>(x * (A(kA) + A(kB) * x * x));
    return dy * s * (1 + x * (1 - s) * (A(kA) + A(3 * kB) * x * x));
  }
};

struct AddOp {
  template <typename T, typename A>
  static __device__ A Apply(A a, A b) {
    return a + b;
  }
};

}  // namespace

void GeluForward(const Tensor& x, const Tensor& y) { Map<GeluOp, false>(x, Tensor(), y); }

void GeluBackward(const Tensor& x, const Tensor& dy, const Tensor& dx) {
  Map<GeluBackwardOp, true>(x, dy, dx);
}

void AddForward(const Tensor& a, const Tensor& b, const Tensor& y) { Map<AddOp, true>(a, b, y); }

}  // namespace cuda
}  // namespace burst
