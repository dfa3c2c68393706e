#include "burst/base/parallel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/matmul.h"
#include "model/ops/ops.h"

namespace burst {

// ---- Linear.

namespace {

// y = x W^T + bias + residual. x: [rows, in], weight: [out, in], y: [rows, out]; bias and residual
// may be null.
template <typename T>
void LinearForward(const MatrixView<T>& x, const MatrixView<T>& weight, T* bias, T* residual,
                   const MatrixView<T>& y) {
  if (bias != nullptr || residual != nullptr) {
    ParallelFor(y.rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        auto row = AsArray(y.data + i * y.cols, y.cols);
        if (residual == nullptr) {
          row = AsArray(bias, y.cols);
        } else if (bias == nullptr) {
          row = AsArray(residual + i * y.cols, y.cols);
        } else {
          row = AsArray(residual + i * y.cols, y.cols) + AsArray(bias, y.cols);
        }
      }
    });
  }
  const bool started = bias != nullptr || residual != nullptr;
  MatMul(x, weight.Transposed(), y, started ? Into::kAccumulate : Into::kAssign);
}

// dbias += sum over rows of dy [rows, out]
template <typename T>
void BiasBackward(const MatrixView<T>& dy, T* dbias) {
  SumOverRowBlocks(dy.rows, dy.cols, dbias, [&](int64_t begin, int64_t end, T* partial) {
    for (int64_t i = begin; i < end; ++i) {
      AsArray(partial, dy.cols) += AsArray(dy.data + i * dy.cols, dy.cols);
    }
  });
}

// Returns the leading axes of x, whose remaining axes hold `in` elements, followed by out.
Shape OutputShape(const Shape& x, int64_t in, int64_t out) {
  Shape shape = x;
  int64_t trailing = 1;
  do {  // at least one axis, for `in` may be 1
    trailing *= shape.back();
    shape.pop_back();
  } while (!shape.empty() && trailing < in);
  BURST_CHECK_EQ(trailing, in) << "no trailing axes of " << ToString(x) << " match the weight";
  shape.push_back(out);
  return shape;
}

}  // namespace

Variable Linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                const Variable& residual, const std::function<void()>& dx_done, ResultUse use,
                LinearPrecision precision) {
  const int64_t out = weight.value().dim(0), in = weight.value().dim(1);
  const Shape shape = OutputShape(x.shape(), in, out);
  if (residual.defined()) {
    BURST_CHECK(residual.shape() == shape && residual.value().is_contiguous());
  }
  if (precision != LinearPrecision::kTensors) {
    BURST_CHECK(x.value().device() == DeviceType::kCuda) << "float8 is for GPUs";
    return cuda::LinearInFloat8(tape, x, weight, bias, residual, shape, dx_done, use, precision);
  }
  if (x.value().device() == DeviceType::kCuda) {
    return cuda::Linear(tape, x, weight, bias, residual, shape, dx_done, use);
  }
  const DType dtype = x.value().dtype();
  const Variable y =
      tape.Output(use == ResultUse::kUnread ? Tensor::Null(shape, dtype, DeviceType::kCpu)
                                            : Tensor::Empty(shape, dtype),
                  {x, weight, bias, residual});
  DispatchComputed(dtype, [&](auto zero) {
    if (use == ResultUse::kUnread) return;
    using T = decltype(zero);
    LinearForward<T>(AsMatrix<T>(ReadAs<T>(x.value()).tensor(), in),
                     AsMatrix<T>(ReadAs<T>(weight.value()).tensor(), in),
                     ReadAs<T>(bias.defined() ? bias.value() : Tensor()),
                     ReadAs<T>(residual.defined() ? residual.value() : Tensor()),
                     AsMatrix<T>(WriteAs<T>(y.value()).tensor(), out));
  });
  if (!tape.NeedsGrad({x, weight, bias, residual})) return y;

  // dx += dy W, dW += dy^T x, dbias += sum of dy, dresidual += dy
  tape.Record("linear", {y}, [=] {
    const Tensor y_grad = y.grad().Contiguous();
    DispatchComputed(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      const auto dy_numbers = ReadAs<T>(y_grad);
      const auto dy = AsMatrix<T>(dy_numbers.tensor(), out);
      if (x.requires_grad()) {
        MatMul(dy, AsMatrix<T>(ReadAs<T>(weight.value()).tensor(), in),
               AsMatrix<T>(UpdateAs<T>(x.MutableGrad()).tensor(), in), Into::kAccumulate);
      }
      if (dx_done != nullptr) dx_done();
      if (weight.requires_grad()) {
        MatMul(dy.Transposed(), AsMatrix<T>(ReadAs<T>(x.value()).tensor(), in),
               AsMatrix<T>(UpdateAs<T>(weight.MutableGrad()).tensor(), in), Into::kAccumulate);
      }
      if (bias.defined() && bias.requires_grad()) {
        BiasBackward<T>(dy, UpdateAs<T>(bias.MutableGrad()));
      }
    });
    if (residual.defined()) residual.AddGrad(y.grad());
  });
  return y;
}

// ---- The feed-forwards of GPT-2, Llama and Gemma.

Variable GeluMlp(Tape& tape, const Variable& x, const Variable& up, const Variable& up_bias,
                 const Variable& down, const Variable& down_bias, const Variable& residual,
                 const std::function<void()>& dx_done, ResultUse use, LinearPrecision precision) {
  if (x.value().device() == DeviceType::kCuda && x.value().dtype() == DType::kBFloat16 &&
      precision == LinearPrecision::kTensors) {
    return cuda::GeluMlp(tape, x, up, up_bias, down, down_bias, residual, dx_done, use);
  }
  const Variable hidden =
      Gelu(tape, Linear(tape, x, up, up_bias, {}, dx_done, ResultUse::kRead, precision));
  return Linear(tape, hidden, down, down_bias, residual, nullptr, use, precision);
}

Variable SwiGluMlp(Tape& tape, const Variable& x, const Variable& gate_up,
                   const Variable& gate_up_bias, const Variable& down, const Variable& down_bias,
                   const Variable& residual, const std::function<void()>& dx_done, ResultUse use,
                   LinearPrecision precision) {
  if (precision == LinearPrecision::kFloat8 && !gate_up_bias.defined() && x.value().numel() > 0) {
    Shape shape = x.shape();
    shape.back() = down.value().dim(0);
    return cuda::SwiGluMlpInFloat8(tape, x, gate_up, down, down_bias, residual, shape, dx_done,
                                   use);
  }
  const Variable hidden = SwiGlu(
      tape, Linear(tape, x, gate_up, gate_up_bias, {}, dx_done, ResultUse::kRead, precision));
  return Linear(tape, hidden, down, down_bias, residual, nullptr, use, precision);
}

Variable GeGluMlp(Tape& tape, const Variable& x, const Variable& gate_up,
                  const Variable& gate_up_bias, const Variable& down, const Variable& down_bias,
                  const Variable& residual, const std::function<void()>& dx_done, ResultUse use,
                  LinearPrecision precision) {
  const Variable hidden =
      GeGlu(tape, Linear(tape, x, gate_up, gate_up_bias, {}, dx_done, ResultUse::kRead, precision));
  return Linear(tape, hidden, down, down_bias, residual, nullptr, use, precision);
}

}  // namespace burst
