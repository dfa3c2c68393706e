// Linear on a GPU with products of float8. A tensor has one scale, which follows from its largest
// magnitude.
//
// Hopper multiplies float8 matrices only if both have k along their rows in memory. So each operand
// is rounded in the form that its product needs:
//
//   y  = x W^T    x and W by rows
//   dx = dy W     dy by rows, W by columns
//   dW = dy^T x   dy and x by columns
//
// The backward makes its own forms of x and W from the bfloat16 tensors. Keeping the forward's
// forms would take more memory.
#include "burst/autograd/tape.h"
#include "burst/base/check.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/matmul.h"

namespace burst {
namespace cuda {
namespace {

Tensor AmaxOf(const Tensor& x) {
  const Tensor amax = Tensor::Empty({1}, DType::kFloat32, DeviceType::kCuda);
  BURST_GPU_KERNEL(LargestMagnitude, x, amax);
  return amax;
}

// A tensor [rows, cols] in float8, by rows, by columns or both, and its scale.
struct Float8 {
  Tensor rows, columns, scale;
  const float* scale_data() const { return static_cast<const float*>(scale.raw_data()); }
};

Float8 Round(const Tensor& x, int64_t cols, const Tensor& amax, DType dtype, bool by_rows,
             bool by_columns) {
  Float8 result;
  const int64_t rows = x.numel() / cols;
  if (by_rows) result.rows = Tensor::Empty({rows, cols}, dtype, DeviceType::kCuda);
  if (by_columns) {
    result.columns = Tensor::Empty({cols, (rows + 15) / 16 * 16}, dtype, DeviceType::kCuda);
  }
  result.scale = Tensor::Empty({1}, DType::kFloat32, DeviceType::kCuda);
  BURST_GPU_KERNEL(RoundToFloat8, x, cols, amax, result.rows, result.columns, result.scale);
  return result;
}

// a b^T, where both have k along their rows.
MatMulParams Product(const Tensor& a, const float* a_scale, const Tensor& b, const float* b_scale) {
  MatMulParams gemm;
  gemm.a = AsMatrix(a, a.dim(1));
  gemm.b = AsMatrix(b, b.dim(1)).Transposed();
  gemm.a_scale = a_scale;
  gemm.b_scale = b_scale;
  return gemm;
}

}  // namespace

Variable LinearInFloat8(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                        const Variable& residual, const Shape& y_shape,
                        const std::function<void()>& dx_done, ResultUse use) {
  const int64_t out = weight.value().dim(0), in = weight.value().dim(1);
  BURST_CHECK(x.value().dtype() == DType::kBFloat16 && in % 16 == 0 && out % 16 == 0)
      << "a linear layer of " << in << " x " << out << " channels in float8";
  if (x.value().numel() == 0) {  // nothing to round
    return Linear(tape, x, weight, bias, residual, y_shape, dx_done, use);
  }
  const Tensor x_amax = AmaxOf(x.value()), weight_amax = AmaxOf(weight.value());
  Tensor value = Tensor::Null(y_shape, x.value().dtype(), DeviceType::kCuda);
  if (use != ResultUse::kUnread) {
    value = Tensor::Empty(y_shape, x.value().dtype(), DeviceType::kCuda);
    const Float8 a = Round(x.value(), in, x_amax, DType::kFloat8E4M3, true, false);
    const Float8 b = Round(weight.value(), in, weight_amax, DType::kFloat8E4M3, true, false);
    MatMulParams gemm = Product(a.rows, a.scale_data(), b.rows, b.scale_data());
    gemm.c = AsMatrix(value, out);
    if (residual.defined()) gemm.addend = residual.value().raw_data();
    if (bias.defined()) {
      gemm.epilogue = Epilogue::kBias;
      gemm.vector = bias.value().raw_data();
    }
    BURST_GPU_KERNEL(MatMul, gemm);
  }
  const Variable y = tape.Output(value, {x, weight, bias, residual});
  if (!tape.NeedsGrad({x, weight, bias, residual})) return y;

  // dx += dy W, dW += dy^T x, dbias += sum of dy, dresidual += dy
  tape.Record("linear_in_float8", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    const Float8 d =
        Round(dy, out, AmaxOf(dy), DType::kFloat8E5M2, x.requires_grad(), weight.requires_grad());
    if (x.requires_grad()) {
      const Float8 w = Round(weight.value(), in, weight_amax, DType::kFloat8E4M3, false, true);
      AddGemm(x, in, Product(d.rows, d.scale_data(), w.columns, w.scale_data()));
    }
    if (dx_done != nullptr) dx_done();
    if (weight.requires_grad()) {
      const Float8 a = Round(x.value(), in, x_amax, DType::kFloat8E4M3, false, true);
      AddGemm(weight, in, Product(d.columns, d.scale_data(), a.columns, a.scale_data()));
    }
    BiasBackward(dy, bias);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

}  // namespace cuda
}  // namespace burst
