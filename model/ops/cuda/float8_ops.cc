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
#include "model/ops/ops.h"

namespace burst {
namespace cuda {
namespace {

Tensor Floats(int64_t count) { return Tensor::Empty({count}, DType::kFloat32, DeviceType::kCuda); }

Tensor AmaxOf(const Tensor& x) {
  const Tensor amax = Floats(1);
  BURST_GPU_KERNEL(LargestMagnitude, x, amax);
  return amax;
}

// A matrix in float8 whose rows lie along a product's sum, and its scales.
struct Form {
  Tensor data, scales;
  Scaling scaling = Scaling::kTensor;
};

// A matrix [rows, cols] in float8: itself, its transpose, or both (kernels.h).
struct Float8 {
  Form rows, columns;

  // With one scale.
  static Float8 Empty(int64_t rows, int64_t cols, DType dtype, bool by_rows, bool by_columns) {
    Float8 result;
    if (by_rows) result.rows.data = Tensor::Empty({rows, cols}, dtype, DeviceType::kCuda);
    if (by_columns) {
      result.columns.data = Tensor::Empty({cols, (rows + 15) / 16 * 16}, dtype, DeviceType::kCuda);
    }
    result.rows.scales = result.columns.scales = Floats(1);
    return result;
  }
  const Tensor& scale() const { return rows.scales; }
};

Float8 Round(const Tensor& x, int64_t cols, const Tensor& amax, DType dtype, bool by_rows,
             bool by_columns) {
  const Float8 to = Float8::Empty(x.numel() / cols, cols, dtype, by_rows, by_columns);
  BURST_GPU_KERNEL(RoundToFloat8, x, cols, amax, to.rows.data, to.columns.data, to.scale());
  return to;
}

// The largest magnitudes of each row and each column; null unless the scaling is kRow.
struct RowAmax {
  RowAmax(const Tensor& x, int64_t cols, Scaling scaling) {
    if (scaling != Scaling::kRow) return;
    rows = Floats(x.numel() / cols);
    columns = Floats(cols);
    BURST_GPU_KERNEL(RowAndColumnAmax, x, cols, rows, columns);
  }
  Tensor rows, columns;
};

// Rounds to e4m3 with a scale for each row or for parts of rows.
Float8 RoundInParts(const Tensor& x, int64_t cols, Scaling scaling, const RowAmax& amax,
                    bool by_rows, bool by_columns) {
  const int64_t rows = x.numel() / cols;
  const auto blocks = [](int64_t n) { return (n + 127) / 128; };
  const auto floats = [&](int64_t outer, int64_t inner) {
    if (scaling == Scaling::kRow) return Floats(outer);
    if (scaling == Scaling::kVector) return Floats(blocks(inner) * outer);
    return Floats(blocks(outer) * ((blocks(inner) + 3) / 4 * 4));
  };
  Float8 to = Float8::Empty(rows, cols, DType::kFloat8E4M3, by_rows, by_columns);
  to.rows.scales = floats(rows, cols);
  to.columns.scales = floats(cols, rows);
  to.rows.scaling = to.columns.scaling = scaling;
  BURST_GPU_KERNEL(RoundWithScales, x, cols, scaling, amax.rows, amax.columns, to.rows.data,
                   to.columns.data, to.rows.scales, to.columns.scales);
  return to;
}

// The scaling of activations and gradients, and of weights.
Scaling ScalingOf(LinearPrecision precision, bool is_weight) {
  if (precision == LinearPrecision::kFloat8Rows) return Scaling::kRow;
  if (precision == LinearPrecision::kFloat8) return Scaling::kTensor;
  return is_weight ? Scaling::kBlock : Scaling::kVector;
}

// dy, the gradient of a result y, in float8.
Float8 RoundGrad(const Variable& y, const Tensor& dy, int64_t cols, bool by_rows, bool by_columns,
                 LinearPrecision precision = LinearPrecision::kFloat8) {
  const Scaling scaling = ScalingOf(precision, /*is_weight=*/false);
  if (scaling != Scaling::kTensor) {
    return RoundInParts(dy, cols, scaling, RowAmax(dy, cols, scaling), by_rows, by_columns);
  }
  const Tensor amax = y.grad_amax().null() ? AmaxOf(dy) : y.grad_amax();
  return Round(dy, cols, amax, DType::kFloat8E5M2, by_rows, by_columns);
}

// A factor of a linear layer, x or W: in bfloat16, or in e4m3 by rows with a scale. Its value is
// read again whenever a form is asked for, because a backward may put it back only then.
class Factor {
 public:
  Factor(const Variable& x, int64_t cols, Scaling scaling = Scaling::kTensor)
      : x_(x),
        cols_(cols),
        scaling_(scaling),
        amax_(scaling == Scaling::kTensor && x.scale().null() ? AmaxOf(x.value()) : Tensor()),
        row_amax_(x.value(), cols, scaling) {
    BURST_CHECK(x.grad_dtype() == DType::kBFloat16 && cols % 16 == 0)
        << "a factor of " << Name(x.grad_dtype()) << " with " << cols << " channels in float8";
    BURST_CHECK(scaling == Scaling::kTensor || x.scale().null());
  }

  Form ByRows() const {
    if (x_.scale().null()) return Rounded(/*by_rows=*/true).rows;
    return {x_.value().View({x_.value().numel() / cols_, cols_}), x_.scale()};
  }
  Form ByColumns() const {
    if (x_.scale().null()) return Rounded(/*by_rows=*/false).columns;
    const Float8 result =
        Float8::Empty(x_.value().numel() / cols_, cols_, DType::kFloat8E4M3, false, true);
    BURST_GPU_KERNEL(TransposeFloat8, x_.value(), cols_, result.columns.data);
    return {result.columns.data, x_.scale()};
  }

  const Variable& variable() const { return x_; }
  int64_t cols() const { return cols_; }

 private:
  Float8 Rounded(bool by_rows) const {
    if (scaling_ == Scaling::kTensor) {
      return Round(x_.value(), cols_, amax_, DType::kFloat8E4M3, by_rows, !by_rows);
    }
    return RoundInParts(x_.value(), cols_, scaling_, row_amax_, by_rows, !by_rows);
  }

  Variable x_;
  int64_t cols_;
  Scaling scaling_;
  Tensor amax_;
  RowAmax row_amax_;
};

// a b^T
MatMulParams Product(const Form& a, const Form& b) {
  MatMulParams gemm;
  gemm.a = AsMatrix(a.data, a.data.dim(1));
  gemm.b = AsMatrix(b.data, b.data.dim(1)).Transposed();
  gemm.a_scale = static_cast<const float*>(a.scales.raw_data());
  gemm.b_scale = static_cast<const float*>(b.scales.raw_data());
  gemm.a_scaling = a.scaling;
  gemm.b_scaling = b.scaling;
  return gemm;
}

// y = x W^T + bias + residual; bias and residual may be undefined.
void Forward(const Form& x, const Form& weight, const Variable& bias, const Variable& residual,
             const Tensor& y) {
  MatMulParams gemm = Product(x, weight);
  gemm.c = AsMatrix(y, weight.data.dim(0));
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
    AddGemm(x.variable(), x.cols(), Product(dy.rows, weight.ByColumns()));
  }
  if (dx_done != nullptr) dx_done();
  if (weight.variable().requires_grad()) {
    AddGemm(weight.variable(), x.cols(), Product(dy.columns, x.ByColumns()));
  }
}

}  // namespace

Variable LinearInFloat8(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                        const Variable& residual, const Shape& y_shape,
                        const std::function<void()>& dx_done, ResultUse use,
                        LinearPrecision precision) {
  if (x.value().numel() == 0) {  // nothing to round
    if (x.scale().null()) {
      return Linear(tape, x, weight, bias, residual, y_shape, dx_done, use);
    }
    // The result has the dtype of its first factor, which must not be e4m3.
    const Variable none =
        tape.Output(Tensor::Empty(x.shape(), x.grad_dtype(), DeviceType::kCuda), {x});
    const auto none_done = [=] {
      if (x.requires_grad()) x.AddGrad(none.grad());
      if (dx_done != nullptr) dx_done();
    };
    return Linear(tape, none, weight, bias, residual, y_shape, none_done, use);
  }
  const int64_t out = weight.value().dim(0), in = weight.value().dim(1);
  // cuBLASLt reads the scales of blocks by 16 bytes.
  constexpr int64_t kBlockTokens = 4;
  if (precision == LinearPrecision::kFloat8Blocks && x.value().numel() / in % kBlockTokens != 0) {
    precision = LinearPrecision::kFloat8Rows;
  }
  const Factor x_factor(x, in, ScalingOf(precision, /*is_weight=*/false));
  const Factor w_factor(weight, in, ScalingOf(precision, /*is_weight=*/true));
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
    Backward(RoundGrad(y, dy, out, x.requires_grad(), weight.requires_grad(), precision), x_factor,
             w_factor, dx_done);
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
  const Tensor largest = Floats(kSwiGluMagnitudes);
  BURST_GPU_KERNEL(SwiGluMagnitudes, pre, largest);
  // The backward rounds h = silu(gate) up again, from the e4m3 of pre.
  const bool keeps = tape.NeedsGrad({x, gate_up, down, down_bias, residual});
  Tensor kept, kept_scales;
  if (keeps) {
    kept = Tensor::Empty({tokens, 2 * ffn}, DType::kFloat8E4M3, DeviceType::kCuda);
    kept_scales = Floats(2);
  }
  const Float8 hidden = Float8::Empty(tokens, ffn, DType::kFloat8E4M3, /*by_rows=*/true, false);
  BURST_GPU_KERNEL(SwiGluToFloat8, pre, largest, hidden.rows.data, hidden.scale(), kept,
                   kept_scales);
  Tensor value = Tensor::Null(y_shape, DType::kBFloat16, DeviceType::kCuda);
  if (use != ResultUse::kUnread) {
    value = Tensor::Empty(y_shape, DType::kBFloat16, DeviceType::kCuda);
    Forward(hidden.rows, second.ByRows(), down_bias, residual, value);
  }
  const Variable y = tape.Output(value, {x, gate_up, down, down_bias, residual});
  if (!keeps) return y;

  // ddown += dy^T h, dh = dy down, dpre = the gradient of silu(gate) up,
  // dx += dpre gate_up, dgate_up += dpre^T x, ddown_bias += sum of dy, dresidual += dy
  tape.Record("swiglu_mlp_in_float8", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    const Tensor dh = Tensor::Empty({tokens, ffn}, DType::kBFloat16, DeviceType::kCuda);
    {
      const Float8 d = RoundGrad(y, dy, out, /*by_rows=*/true, down.requires_grad());
      MatMulParams gemm = Product(d.rows, second.ByColumns());
      gemm.c = AsMatrix(dh, ffn);
      BURST_GPU_KERNEL(MatMul, gemm);
      if (down.requires_grad()) {
        const Float8 h = Float8::Empty(tokens, ffn, DType::kFloat8E4M3, false, true);
        BURST_GPU_KERNEL(KeptSwiGluToFloat8, kept, kept_scales, largest, h.columns.data, h.scale());
        AddGemm(down, ffn, Product(d.columns, h.columns));
      }
    }
    BiasBackward(dy, down_bias);
    const Float8 dpre = Float8::Empty(tokens, 2 * ffn, DType::kFloat8E5M2, x.requires_grad(),
                                      gate_up.requires_grad());
    BURST_GPU_KERNEL(SwiGluGradToFloat8, kept, kept_scales, dh, AmaxOf(dh), largest, dpre.rows.data,
                     dpre.columns.data, dpre.scale());
    Backward(dpre, x_factor, first, dx_done);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

}  // namespace cuda
}  // namespace burst
