#include "model/ops/add.h"

#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"

namespace burst {

Variable Add(Tape& tape, const Variable& a, const Variable& b) {
  BURST_CHECK(a.shape() == b.shape() && a.value().is_contiguous() && b.value().is_contiguous());
  const Variable y = tape.Output(Tensor::EmptyLike(a.value()), {a, b});
  if (y.value().device() == DeviceType::kCuda) {
    BURST_CUDA_CALL(cuda::AddForward(a.value(), b.value(), y.value()));
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

}  // namespace burst
