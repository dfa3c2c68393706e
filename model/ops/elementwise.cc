#include "burst/base/parallel.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/ops.h"

namespace burst {

// ---- Add.

Variable Add(Tape& tape, const Variable& a, const Variable& b) {
  BURST_CHECK(a.shape() == b.shape() && a.value().is_contiguous() && b.value().is_contiguous());
  const Variable y = tape.Output(Tensor::EmptyLike(a.value()), {a, b});
  if (y.value().device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(AddForward, a.value(), b.value(), y.value());
  } else {
    DispatchFloat(y.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      ForEachTile(y.value().numel(), [&](int64_t begin, int64_t size) {
        AsArray(y.value().data<T>() + begin, size) =
            AsArray(a.value().data<T>() + begin, size) + AsArray(b.value().data<T>() + begin, size);
      });
    });
  }
  if (!tape.NeedsGrad({a, b})) return y;

  // da += dy, db += dy
  tape.Record("add", {y}, [=] {
    a.AddGrad(y.grad());
    b.AddGrad(y.grad());
  });
  return y;
}

// ---- GELU.

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
    BURST_GPU_KERNEL(GeluForward, x.value(), y.value());
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
      BURST_GPU_KERNEL(GeluBackward, x.value(), dy, dx);
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

// ---- Softcap.

namespace {

template <typename T>
void SoftCapForward(int64_t n, T cap, const T* x, T* y) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    AsArray(y + begin, size) = cap * (AsArray(x + begin, size) / cap).tanh();
  });
}

// dx = dy (1 - (y / cap)^2)
template <typename T>
void SoftCapBackward(int64_t n, T cap, const T* y, const T* dy, T* dx) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    AsArray(dx + begin, size) =
        AsArray(dy + begin, size) * (1 - (AsArray(y + begin, size) / cap).square());
  });
}

}  // namespace

Variable SoftCap(Tape& tape, const Variable& x, double cap) {
  BURST_CHECK(x.value().is_contiguous() && cap > 0);
  const int64_t n = x.value().numel();
  const Variable y = tape.Output(Tensor::EmptyLike(x.value()), {x});
  const bool on_gpu = x.value().device() == DeviceType::kCuda;
  if (on_gpu) {
    BURST_GPU_KERNEL(SoftCapForward, x.value(), cap, y.value());
  } else {
    DispatchFloat(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      SoftCapForward<T>(n, static_cast<T>(cap), x.value().data<T>(), y.value().data<T>());
    });
  }
  if (!tape.NeedsGrad({x})) return y;

  tape.Record("softcap", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    if (on_gpu) {
      BURST_GPU_KERNEL(SoftCapBackward, y.value(), dy, cap, dx);
    } else {
      DispatchFloat(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        SoftCapBackward<T>(n, static_cast<T>(cap), y.value().data<T>(), dy.data<T>(), dx.data<T>());
      });
    }
    x.AddGrad(dx);
  });
  return y;
}

// ---- SwiGLU.

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
    BURST_GPU_KERNEL(SwiGluForward, gate_up.value(), y.value());
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
      BURST_GPU_KERNEL(SwiGluBackward, gate_up.value(), dy, dgate_up);
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
