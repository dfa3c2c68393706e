#include "model/ops/swiglu.h"

#include "burst/base/parallel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"

namespace burst {
namespace {

constexpr int64_t kGrain = 8;  // rows

// y = gate s up, s = sigmoid(gate). gate_up: [rows, 2 n], y: [rows, n]
template <typename T>
void SwiGluForward(int64_t rows, int64_t n, const T* gate_up, T* y) {
  ParallelFor(rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto gate = AsArray(gate_up + 2 * i * n, n), up = AsArray(gate_up + (2 * i + 1) * n, n);
      AsArray(y + i * n, n) = gate * up * Sigmoid(gate);
    }
  });
}

// dgate = dy up s (1 + gate (1 - s)), dup = dy gate s. dy: [rows, n], dgate_up: [rows, 2 n]
template <typename T>
void SwiGluBackward(int64_t rows, int64_t n, const T* gate_up, const T* dy, T* dgate_up) {
  ParallelFor(rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; j += kTile) {
        const int64_t size = std::min(kTile, n - j), gate_at = 2 * i * n + j, up_at = gate_at + n;
        const auto gate = AsArray(gate_up + gate_at, size), up = AsArray(gate_up + up_at, size);
        const auto grad = AsArray(dy + i * n + j, size);
        const Tile<T> s = Sigmoid(gate);
        AsArray(dgate_up + gate_at, size) = grad * up * s * (1 + gate * (1 - s));
        AsArray(dgate_up + up_at, size) = grad * gate * s;
      }
    }
  });
}

}  // namespace

Variable SwiGlu(Tape& tape, const Variable& gate_up) {
  BURST_CHECK(gate_up.value().is_contiguous() && gate_up.value().dim(-1) % 2 == 0);
  Shape shape = gate_up.shape();
  shape.back() /= 2;
  const int64_t n = shape.back(), rows = n == 0 ? 0 : gate_up.value().numel() / (2 * n);
  const Variable y = tape.Output(
      Tensor::Empty(shape, gate_up.value().dtype(), gate_up.value().device()), {gate_up});
  const bool on_gpu = gate_up.value().device() == DeviceType::kCuda;
  if (on_gpu) {
    BURST_CUDA_CALL(cuda::SwiGluForward(gate_up.value(), y.value()));
  } else {
    DispatchFloat(gate_up.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      SwiGluForward<T>(rows, n, gate_up.value().data<T>(), y.value().data<T>());
    });
  }
  if (!tape.NeedsGrad({gate_up})) return y;

  tape.Record("swiglu", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dgate_up = Tensor::EmptyLike(gate_up.value());
    if (on_gpu) {
      BURST_CUDA_CALL(cuda::SwiGluBackward(gate_up.value(), dy, dgate_up));
    } else {
      DispatchFloat(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        SwiGluBackward<T>(rows, n, gate_up.value().data<T>(), dy.data<T>(), dgate_up.data<T>());
      });
    }
    gate_up.AddGrad(dgate_up);
  });
  return y;
}

}  // namespace burst
