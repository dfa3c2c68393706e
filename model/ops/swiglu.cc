#include "model/ops/swiglu.h"

#include "model/ops/arrays.h"

namespace burst {
namespace {

// y = gate s up, s = sigmoid(gate). All [n]
template <typename T>
void SwiGluForward(int64_t n, const T* gate, const T* up, T* y) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    const auto g = AsArray(gate + begin, size);
    AsArray(y + begin, size) = g * AsArray(up + begin, size) * Sigmoid(g);
  });
}

// dgate = dy up s (1 + gate (1 - s)), dup = dy gate s
template <typename T>
void SwiGluBackward(int64_t n, const T* gate, const T* up, const T* dy, T* dgate, T* dup) {
  ForEachTile(n, [&](int64_t begin, int64_t size) {
    const auto g = AsArray(gate + begin, size), grad = AsArray(dy + begin, size);
    const Tile<T> s = Sigmoid(g);
    AsArray(dgate + begin, size) = grad * AsArray(up + begin, size) * s * (1 + g * (1 - s));
    AsArray(dup + begin, size) = grad * g * s;
  });
}

}  // namespace

Variable SwiGlu(Tape& tape, const Variable& gate, const Variable& up) {
  const int64_t n = gate.value().numel();
  BURST_CHECK(gate.shape() == up.shape() && gate.value().is_contiguous() &&
              up.value().is_contiguous());
  const Variable y = tape.Output(Tensor::EmptyLike(gate.value()), {gate, up});
  DispatchFloat(gate.value().dtype(), [&](auto zero) {
    using T = decltype(zero);
    SwiGluForward<T>(n, gate.value().data<T>(), up.value().data<T>(), y.value().data<T>());
  });
  if (!tape.NeedsGrad({gate, up})) return y;

  tape.Record("swiglu", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    const Tensor dgate = Tensor::EmptyLike(dy), dup = Tensor::EmptyLike(dy);
    DispatchFloat(dy.dtype(), [&](auto zero) {
      using T = decltype(zero);
      SwiGluBackward<T>(n, gate.value().data<T>(), up.value().data<T>(), dy.data<T>(),
                        dgate.data<T>(), dup.data<T>());
    });
    gate.AddGrad(dgate);
    up.AddGrad(dup);
  });
  return y;
}

}  // namespace burst
