// Linear layers on a GPU with products of float8.
//
// Hopper multiplies float8 matrices only if both have k along their rows in memory. So each factor
// is rounded in the form that its product needs:
//
//   y  = x W^T    x and W by rows
//   dx = dy W     dy by rows, W by columns
//   dW = dy^T x   dy and x by columns
//
// A backward makes the columns of x and W itself. Keeping them since the forward would take more
// memory.
#include "burst/autograd/tape.h"
#include "burst/base/check.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/matmul.h"

namespace burst {
namespace cuda {
namespace {

Tensor Floats(int64_t count) { return Tensor::Empty({count}, DType::kFloat32, DeviceType::kCuda); }

Tensor AmaxOf(const Tensor& x) {
  const Tensor amax = Floats(1);
  BURST_GPU_KERNEL(LargestMagnitude, x, amax);
  return amax;
}

// A matrix [rows, cols] in float8, by rows, by columns or both, and its scale (kernels.h).
struct Float8 {
  Tensor rows, columns, scale;

  static Float8 Empty(int64_t rows, int64_t cols, DType dtype, bool by_rows, bool by_columns) {
    Float8 result;
    if (by_rows) result.rows = Tensor::Empty({rows, cols}, dtype, DeviceType::kCuda);
    if (by_columns) {
      result.columns = Tensor::Empty({cols, (rows + 15) / 16 * 16}, dtype, DeviceType::kCuda);
    }
    result.scale = Floats(1);
    return result;
  }
};

Float8 Round(const Tensor& x, int64_t cols, const Tensor& amax, DType dtype, bool by_rows,
             bool by_columns) {
  const Float8 to = Float8::Empty(x.numel() / cols, cols, dtype, by_rows, by_columns);
  BURST_GPU_KERNEL(RoundToFloat8, x, cols, amax, to.rows, to.columns, to.scale);
  return to;
}

// dy, the gradient of a result y, in float8.
Float8 RoundGrad(const Variable& y, const Tensor& dy, int64_t cols, bool by_rows, bool by_columns) {
  const Tensor amax = y.grad_amax().null() ? AmaxOf(dy) : y.grad_amax();
  return Round(dy, cols, amax, DType::kFloat8E5M2, by_rows, by_columns);
}

// A factor of a linear layer, x or W: in bfloat16, or in e4m3 by rows with a scale. Its value is
// read again whenever a form is asked for, because a backward may put it back only then.
class Factor {
 public:
  Factor(const Variable& x, int64_t cols)
      : x_(x), cols_(cols), amax_(x.scale().null() ? AmaxOf(x.value()) : Tensor()) {
    BURST_CHECK(x.grad_dtype() == DType::kBFloat16 && cols % 16 == 0)
        << "a factor of " << Name(x.grad_dtype()) << " with " << cols << " channels in float8";
  }

  Float8 ByRows() const {
    if (!amax_.null()) return Round(x_.value(), cols_, amax_, DType::kFloat8E4M3, true, false);
    Float8 result;
    result.rows = x_.value().View({x_.value().numel() / cols_, cols_});
    result.scale = x_.scale();
    return result;
  }
  Float8 ByColumns() const {
    if (!amax_.null()) return Round(x_.value(), cols_, amax_, DType::kFloat8E4M3, false, true);
    Float8 result =
        Float8::Empty(x_.value().numel() / cols_, cols_, DType::kFloat8E4M3, false, true);
    BURST_GPU_KERNEL(TransposeFloat8, x_.value(), cols_, result.columns);
    result.scale = x_.scale();
    return result;
  }

  const Variable& variable() const { return x_; }
  int64_t cols() const { return cols_; }

 private:
  Variable x_;
  int64_t cols_;
  Tensor amax_;
};

// a b^T, where both have k along their rows.
MatMulParams Product(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                     const Tensor& b_scale) {
  MatMulParams gemm;
  gemm.a = AsMatrix(a, a.dim(1));
  gemm.b = AsMatrix(b, b.dim(1)).Transposed();
  gemm.a_scale = static_cast<const float*>(a_scale.raw_data());
  gemm.b_scale = static_cast<const float*>(b_scale.raw_data());
  return gemm;
}

// y = x W^T + bias + residual; bias and residual may be undefined.
void Forward(const Float8& x, const Float8& weight, const Variable& bias, const Variable& residual,
             const Tensor& y) {
  MatMulParams gemm = Product(x.rows, x.scale, weight.rows, weight.scale);
  gemm.c = AsMatrix(y, weight.rows.dim(0));
  if (residual.defined()) gemm.addend = residual.value().raw_data();
  if (bias.defined()) {
    gemm.epilogue = Epilogue::kBias;
    gemm.vector = bias.value().raw_data();
  }
  BURST_GPU_KERNEL(MatMul, gemm);
}

// Computes dx += dy W, calls `dx_done`, and computes dW += dy^T x.
void Backward(const Float8& dy, const Factor& x, const Factor& weight,
              const std::function<void()>& dx_done) {
  if (x.variable().requires_grad()) {
    const Float8 w = weight.ByColumns();
    AddGemm(x.variable(), x.cols(), Product(dy.rows, dy.scale, w.columns, w.scale));
  }
  if (dx_done != nullptr) dx_done();
  if (weight.variable().requires_grad()) {
    const Float8 a = x.ByColumns();
    AddGemm(weight.variable(), x.cols(), Product(dy.columns, dy.scale, a.columns, a.scale));
  }
}

}  // namespace

Variable LinearInFloat8(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                        const Variable& residual, const Shape& y_shape,
                        const std::function<void()>& dx_done, ResultUse use) {
  if (x.value().numel() == 0) {  // nothing to round
    BURST_CHECK(x.scale().null()) << "float8 without tokens";
    return Linear(tape, x, weight, bias, residual, y_shape, dx_done, use);
  }
  const int64_t out = weight.value().dim(0), in = weight.value().dim(1);
  const Factor x_factor(x, in), w_factor(weight, in);
  Tensor value = Tensor::Null(y_shape, x.grad_dtype(), DeviceType::kCuda);
  if (use != ResultUse::kUnread) {
    value = Tensor::Empty(y_shape, x.grad_dtype(), DeviceType::kCuda);
    Forward(x_factor.ByRows(), w_factor.ByRows(), bias, residual, value);
  }
  const Variable y = tape.Output(value, {x, weight, bias, residual});
  if (!tape.NeedsGrad({x, weight, bias, residual})) return y;

  // dx += dy W, dW += dy^T x, dbias += sum of dy, dresidual += dy
  tape.Record("linear_in_float8", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    Backward(RoundGrad(y, dy, out, x.requires_grad(), weight.requires_grad()), x_factor, w_factor,
             dx_done);
    BiasBackward(dy, bias);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

Variable SwiGluMlpInFloat8(Tape& tape, const Variable& x, const Variable& gate_up,
                           const Variable& down, const Variable& down_bias,
                           const Variable& residual, const Shape& y_shape,
                           const std::function<void()>& dx_done, ResultUse use) {
  const int64_t width = gate_up.value().dim(1), out = down.value().dim(0),
                ffn = down.value().dim(1);
  const int64_t tokens = x.value().numel() / width;
  const Factor x_factor(x, width), first(gate_up, width), second(down, ffn);
  // pre = [gate, up] = x gate_up^T
  const Tensor pre = Tensor::Empty({tokens, 2 * ffn}, DType::kBFloat16, DeviceType::kCuda);
  Forward(x_factor.ByRows(), first.ByRows(), {}, {}, pre);
  const Tensor largest = Floats(3);
  BURST_GPU_KERNEL(SwiGluMagnitudes, pre, largest);
  // h = silu(gate) up, rounded again from pre by the backward
  const auto hidden = [=](bool by_rows) {
    const Float8 h = Float8::Empty(tokens, ffn, DType::kFloat8E4M3, by_rows, !by_rows);
    BURST_GPU_KERNEL(SwiGluToFloat8, pre, largest, h.rows, h.columns, h.scale);
    return h;
  };
  Tensor value = Tensor::Null(y_shape, DType::kBFloat16, DeviceType::kCuda);
  if (use != ResultUse::kUnread) {
    value = Tensor::Empty(y_shape, DType::kBFloat16, DeviceType::kCuda);
    Forward(hidden(/*by_rows=*/true), second.ByRows(), down_bias, residual, value);
  }
  const Variable y = tape.Output(value, {x, gate_up, down, down_bias, residual});
  if (!tape.NeedsGrad({x, gate_up, down, down_bias, residual})) return y;

  // ddown += dy^T h, dh = dy down, dpre = the gradient of silu(gate) up,
  // dx += dpre gate_up, dgate_up += dpre^T x, ddown_bias += sum of dy, dresidual += dy
  tape.Record("swiglu_mlp_in_float8", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    const Tensor dh = Tensor::Empty({tokens, ffn}, DType::kBFloat16, DeviceType::kCuda);
    {
      const Float8 d = RoundGrad(y, dy, out, /*by_rows=*/true, down.requires_grad());
      const Float8 w = second.ByColumns();
      MatMulParams gemm = Product(d.rows, d.scale, w.columns, w.scale);
      gemm.c = AsMatrix(dh, ffn);
      BURST_GPU_KERNEL(MatMul, gemm);
      if (down.requires_grad()) {
        const Float8 h = hidden(/*by_rows=*/false);
        AddGemm(down, ffn, Product(d.columns, d.scale, h.columns, h.scale));
      }
    }
    BiasBackward(dy, down_bias);
    const Float8 dpre = Float8::Empty(tokens, 2 * ffn, DType::kFloat8E5M2, x.requires_grad(),
                                      gate_up.requires_grad());
    BURST_GPU_KERNEL(SwiGluGradToFloat8, pre, dh, AmaxOf(dh), largest, dpre.rows, dpre.columns,
                     dpre.scale);
    Backward(dpre, x_factor, first, dx_done);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

}  // namespace cuda
}  // namespace burst
