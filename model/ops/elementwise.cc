#include <type_traits>

#include "burst/base/parallel.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/ops.h"

namespace burst {

// ---- Add.

namespace {

// y = a + b. a, b, y: [n]
template <typename T>
void AddForward(int64_t n, const T* a, const T* b, T* y) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    AsArray(y + begin, size) = AsArray(a + begin, size) + AsArray(b + begin, size);
  });
}

}  // namespace

Variable Add(Tape& tape, const Variable& a, const Variable& b) {
  BURST_CHECK(a.shape() == b.shape() && a.value().is_contiguous() && b.value().is_contiguous());
  const Variable y = tape.Output(Tensor::EmptyLike(a.value()), {a, b});
  if (y.value().device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(AddForward, a.value(), b.value(), y.value());
  } else {
    DispatchComputed(y.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      AddForward<T>(y.value().numel(), ReadAs<T>(a.value()), ReadAs<T>(b.value()),
                    WriteAs<T>(y.value()));
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

// ---- Scale.

namespace {

template <typename T>
void ScaleForward(int64_t n, T factor, const T* x, T* y) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    AsArray(y + begin, size) = factor * AsArray(x + begin, size);
  });
}

// Returns y = factor x, of x's shape.
Tensor Scaled(const Tensor& x, double factor) {
  const Tensor y = Tensor::EmptyLike(x);
  if (x.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(ScaleForward, x, factor, y);
    return y;
  }
  DispatchComputed(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    ScaleForward<T>(x.numel(), T(factor), ReadAs<T>(x), WriteAs<T>(y));
  });
  return y;
}

}  // namespace

Variable Scale(Tape& tape, const Variable& x, double factor) {
  BURST_CHECK(x.value().is_contiguous());
  const double rounded =
      Tensor::FromVector<double>({factor}, {1}).To(x.value().dtype()).ToVector<double>()[0];
  const Variable y = tape.Output(Scaled(x.value(), rounded), {x});
  if (!tape.NeedsGrad({x})) return y;

  // dx = factor dy
  tape.Record("scale", {y}, [=] { x.AddGrad(Scaled(y.grad().Contiguous(), rounded)); });
  return y;
}

// ---- GELU, and the activations of gates.

namespace {

// An activation is f(x) = x sigmoid(u(x)). u and its slope u' are arrays or numbers.
struct SiluGate {
  template <typename Array>
  static auto U(const Array& x) {
    return x;
  }
  template <typename Array>
  static auto Slope(const Array&) {
    return typename Array::Scalar(1);
  }
};

// GELU: (1 + tanh v) / 2 = sigmoid(2 v), so u = 2 v = x (a + b x^2).
struct GeluGate {
  static constexpr double kA = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kB = 0.044715 * kA;
  template <typename Array>
  static auto U(const Array& x) {
    using T = typename Array::Scalar;
    return x * (T(kA) + T(kB) * x.square());
  }
  template <typename Array>
  static auto Slope(const Array& x) {
    using T = typename Array::Scalar;
    return T(kA) + 3 * T(kB) * x.square();
  }
};

// y = x s, s = sigmoid(u). x, y: [n]
template <typename T>
void GeluForward(int64_t n, const T* x, T* y) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    const auto in = AsArray(x + begin, size);
    AsArray(y + begin, size) = in * Sigmoid(GeluGate::U(in));
  });
}

// dx = dy s (1 + x (1 - s) u')
template <typename T>
void GeluBackward(int64_t n, const T* x, const T* dy, T* dx) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    const auto in = AsArray(x + begin, size);
    const Tile<T> s = Sigmoid(GeluGate::U(in));
    AsArray(dx + begin, size) =
        AsArray(dy + begin, size) * s * (1 + in * (1 - s) * GeluGate::Slope(in));
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
    DispatchComputed(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      GeluForward<T>(n, ReadAs<T>(x.value()), WriteAs<T>(y.value()));
    });
  }
  if (!tape.NeedsGrad({x})) return y;

  tape.Record("gelu", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    if (on_gpu) {
      BURST_GPU_KERNEL(GeluBackward, x.value(), dy, dx);
    } else {
      DispatchComputed(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        GeluBackward<T>(n, ReadAs<T>(x.value()), ReadAs<T>(dy), WriteAs<T>(dx));
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
    DispatchComputed(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      SoftCapForward<T>(n, static_cast<T>(cap), ReadAs<T>(x.value()), WriteAs<T>(y.value()));
    });
  }
  if (!tape.NeedsGrad({x})) return y;

  tape.Record("softcap", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    if (on_gpu) {
      BURST_GPU_KERNEL(SoftCapBackward, y.value(), dy, cap, dx);
    } else {
      DispatchComputed(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        SoftCapBackward<T>(n, static_cast<T>(cap), ReadAs<T>(y.value()), ReadAs<T>(dy),
                           WriteAs<T>(dx));
      });
    }
    x.AddGrad(dx);
  });
  return y;
}

// ---- SwiGLU and GEGLU.

namespace {

constexpr int64_t kGrain = 8;  // rows

// y = gate s up, s = sigmoid(u(gate)). gate_up: [rows, 2 n], y: [rows, n]
template <typename Gate, typename T>
void GluForward(int64_t rows, int64_t n, const T* gate_up, T* y) {
  ParallelFor(rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto gate = AsArray(gate_up + 2 * i * n, n), up = AsArray(gate_up + (2 * i + 1) * n, n);
      AsArray(y + i * n, n) = gate * up * Sigmoid(Gate::U(gate));
    }
  });
}

// dgate = dy up s (1 + gate (1 - s) u'), dup = dy gate s. dy: [rows, n], dgate_up: [rows, 2 n]
template <typename Gate, typename T>
void GluBackward(int64_t rows, int64_t n, const T* gate_up, const T* dy, T* dgate_up) {
  ParallelFor(rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; j += kTile) {
        const int64_t size = std::min(kTile, n - j), gate_at = 2 * i * n + j, up_at = gate_at + n;
        const auto gate = AsArray(gate_up + gate_at, size), up = AsArray(gate_up + up_at, size);
        const auto grad = AsArray(dy + i * n + j, size);
        const Tile<T> s = Sigmoid(Gate::U(gate));
        AsArray(dgate_up + gate_at, size) =
            grad * up * s * (1 + gate * (1 - s) * Gate::Slope(gate));
        AsArray(dgate_up + up_at, size) = grad * gate * s;
      }
    }
  });
}

template <typename Gate>
Variable Glu(Tape& tape, const Variable& gate_up, const char* name) {
  BURST_CHECK(gate_up.value().is_contiguous() && gate_up.value().dim(-1) % 2 == 0);
  constexpr bool kGelu = std::is_same_v<Gate, GeluGate>;
  Shape shape = gate_up.shape();
  shape.back() /= 2;
  const int64_t n = shape.back(), rows = n == 0 ? 0 : gate_up.value().numel() / (2 * n);
  const Variable y = tape.Output(
      Tensor::Empty(shape, gate_up.value().dtype(), gate_up.value().device()), {gate_up});
  const bool on_gpu = gate_up.value().device() == DeviceType::kCuda;
  if (on_gpu && kGelu) {
    BURST_GPU_KERNEL(GeGluForward, gate_up.value(), y.value());
  } else if (on_gpu) {
    BURST_GPU_KERNEL(SwiGluForward, gate_up.value(), y.value());
  } else {
    DispatchComputed(gate_up.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      GluForward<Gate, T>(rows, n, ReadAs<T>(gate_up.value()), WriteAs<T>(y.value()));
    });
  }
  if (!tape.NeedsGrad({gate_up})) return y;

  tape.Record(name, {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dgate_up = Tensor::EmptyLike(gate_up.value());
    if (on_gpu && kGelu) {
      BURST_GPU_KERNEL(GeGluBackward, gate_up.value(), dy, dgate_up);
    } else if (on_gpu) {
      BURST_GPU_KERNEL(SwiGluBackward, gate_up.value(), dy, dgate_up);
    } else {
      DispatchComputed(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        GluBackward<Gate, T>(rows, n, ReadAs<T>(gate_up.value()), ReadAs<T>(dy),
                             WriteAs<T>(dgate_up));
      });
    }
    gate_up.AddGrad(dgate_up);
  });
  return y;
}

}  // namespace

Variable SwiGlu(Tape& tape, const Variable& gate_up) {
  return Glu<SiluGate>(tape, gate_up, "swiglu");
}

Variable GeGlu(Tape& tape, const Variable& gate_up) {
  return Glu<GeluGate>(tape, gate_up, "geglu");
}

}  // namespace burst
