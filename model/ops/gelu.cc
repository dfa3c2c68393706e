#include "model/ops/gelu.h"

#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"

namespace burst {
namespace {

// (1 + tanh u) / 2 = sigmoid(2u), so with 2u = x (a + b x^2) and s = sigmoid(2u): y = x s.
template <typename T>
constexpr T kA = T(1.5957691216057308);  // 2 sqrt(2 / pi)
template <typename T>
constexpr T kB = T(0.044715 * 1.5957691216057308);

// y = x s. x, y: [n]
template <typename T>
void GeluForward(int64_t n, const T* x, T* y) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    const auto in = AsArray(x + begin, size);
    AsArray(y + begin, size) = in * Sigmoid(in * (kA<T> + kB<T> * in.square()));
  });
}

// dx = dy (s + x s (1 - s) (a + 3 b x^2))
template <typename T>
void GeluBackward(int64_t n, const T* x, const T* dy, T* dx) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    const auto in = AsArray(x + begin, size);
    const Tile<T> s = Sigmoid(in * (kA<T> + kB<T> * in.square()));
    AsArray(dx + begin, size) =
        AsArray(dy + begin, size) * s * (1 + in * (1 - s) * (kA<T> + 3 * kB<T> * in.square()));
  });
}

}  // namespace

Variable Gelu(Tape& tape, const Variable& x) {
  const int64_t n = x.value().numel();
  BURST_CHECK(x.value().is_contiguous());
  const Variable y = tape.Output(Tensor::EmptyLike(x.value()), {x});
  const bool on_gpu = x.value().device() == DeviceType::kCuda;
  if (on_gpu) {
    BURST_CUDA_CALL(cuda::GeluForward(x.value(), y.value()));
  } else {
    DispatchFloat(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      GeluForward<T>(n, x.value().data<T>(), y.value().data<T>());
    });
  }
  if (!tape.NeedsGrad({x})) return y;

  tape.Record("gelu", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    if (on_gpu) {
      BURST_CUDA_CALL(cuda::GeluBackward(x.value(), dy, dx));
    } else {
      DispatchFloat(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        GeluBackward<T>(n, x.value().data<T>(), dy.data<T>(), dx.data<T>());
      });
    }
    x.AddGrad(dx);
  });
  return y;
}

}  // namespace burst
