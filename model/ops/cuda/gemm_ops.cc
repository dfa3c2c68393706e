// Linear, GeluMlp and LinearCrossEntropy on a GPU: this file chooses their GEMMs, kernels and
// memory.
#include <algorithm>

#include "burst/autograd/tape.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/matmul.h"

namespace burst {
namespace cuda {
void AddGemm(const Variable& x, int64_t cols, MatMulParams gemm) {
  if (x.is_parameter()) {
    bool add = false;
    gemm.c = AsMatrix(x.GradToWrite(&add), cols);
    if (add) gemm.addend = gemm.c.data;
    return BURST_GPU_KERNEL(MatMul, gemm);
  }
  if (x.owns_grad() && x.grad().is_contiguous()) {
    gemm.c = AsMatrix(x.MutableGrad(), cols);
    gemm.addend = gemm.c.data;
    return BURST_GPU_KERNEL(MatMul, gemm);
  }
  const Tensor before = x.grad().null() ? Tensor() : x.grad().Contiguous();
  const Tensor sum = Tensor::Empty(x.shape(), x.grad_dtype(), DeviceType::kCuda);
  gemm.c = AsMatrix(sum, cols);
  gemm.addend = before.null() ? nullptr : before.raw_data();
  BURST_GPU_KERNEL(MatMul, gemm);
  x.SetGrad(sum);
}

void BiasBackward(const Tensor& dy, const Variable& bias) {
  if (!bias.defined() || !bias.requires_grad()) return;
  bool add = false;
  const Tensor& grad = bias.GradToWrite(&add);
  const DType accumulator = dy.dtype() == DType::kBFloat16 ? DType::kFloat32 : dy.dtype();
  if (grad.dtype() == accumulator) return BURST_GPU_KERNEL(ColumnSums, dy, grad, add);
  const Tensor sums = Tensor::Empty({bias.value().dim(0)}, accumulator, DeviceType::kCuda);
  BURST_GPU_KERNEL(ColumnSums, dy, sums, /*add=*/false);
  add ? grad.Add(sums.To(grad.dtype())) : grad.ConvertFrom(sums);
}

namespace {

// dweight += dy^T x, dbias += sum over rows of dy; dy: [rows, out], x: [rows, in].
void WeightBackward(const Tensor& dy, const Tensor& x, const Variable& weight,
                    const Variable& bias) {
  const int64_t out = weight.value().dim(0), in = weight.value().dim(1);
  MatMulParams gemm;
  gemm.a = AsMatrix(dy, out).Transposed();
  gemm.b = AsMatrix(x, in);
  if (weight.requires_grad()) AddGemm(weight, in, gemm);
  BiasBackward(dy, bias);
}

// dx += dy W
void InputBackward(const Tensor& dy, const Variable& x, const Variable& weight) {
  if (!x.requires_grad()) return;
  const int64_t out = weight.value().dim(0), in = weight.value().dim(1);
  MatMulParams gemm;
  gemm.a = AsMatrix(dy, out);
  gemm.b = AsMatrix(weight.value(), in);
  AddGemm(x, in, gemm);
}

// Returns y = x W^T + bias + residual in the given shape, or a null tensor if nobody reads y.
Tensor LinearForward(const Tensor& x, const Variable& weight, const Variable& bias,
                     const Variable& residual, const Shape& shape, ResultUse use) {
  if (use == ResultUse::kUnread) return Tensor::Null(shape, x.dtype(), DeviceType::kCuda);
  const Tensor y = Tensor::Empty(shape, x.dtype(), DeviceType::kCuda);
  const int64_t out = weight.value().dim(0), in = weight.value().dim(1);
  const bool fused = bias.defined() && x.dtype() == DType::kBFloat16;
  MatMulParams gemm;
  gemm.a = AsMatrix(x, in);
  gemm.b = AsMatrix(weight.value(), in).Transposed();
  gemm.c = AsMatrix(y, out);
  if (residual.defined()) gemm.addend = residual.value().raw_data();
  if (fused) {
    gemm.epilogue = Epilogue::kBias;
    gemm.vector = bias.value().raw_data();
  }
  BURST_GPU_KERNEL(MatMul, gemm);
  if (bias.defined() && !fused) BURST_GPU_KERNEL(AddBias, y, bias.value());
  return y;
}

}  // namespace

Variable Linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                const Variable& residual, const Shape& y_shape,
                const std::function<void()>& dx_done, ResultUse use) {
  const Variable y = tape.Output(LinearForward(x.value(), weight, bias, residual, y_shape, use),
                                 {x, weight, bias, residual});
  if (!tape.NeedsGrad({x, weight, bias, residual})) return y;

  // dx += dy W, dW += dy^T x, dbias += sum of dy, dresidual += dy
  tape.Record("linear", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    InputBackward(dy, x, weight);
    if (dx_done != nullptr) dx_done();
    WeightBackward(dy, x.value(), weight, bias);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

Variable GeluMlp(Tape& tape, const Variable& x, const Variable& up, const Variable& up_bias,
                 const Variable& down, const Variable& down_bias, const Variable& residual,
                 const std::function<void()>& dx_done, ResultUse use) {
  const int64_t ffn = up.value().dim(0), width = up.value().dim(1);
  Shape shape = x.shape();
  shape.back() = ffn;
  const bool needs_grad = tape.NeedsGrad({x, up, up_bias, down, down_bias, residual});
  // pre = x up^T + up_bias, hidden = gelu(pre)
  const Tensor hidden = Tensor::Empty(shape, x.value().dtype(), DeviceType::kCuda);
  const Tensor pre = needs_grad ? Tensor::EmptyLike(hidden) : Tensor();
  MatMulParams gemm;
  gemm.a = AsMatrix(x.value(), width);
  gemm.b = AsMatrix(up.value(), width).Transposed();
  gemm.c = AsMatrix(hidden, ffn);
  gemm.epilogue = Epilogue::kGelu;
  gemm.vector = up_bias.value().raw_data();
  gemm.pre = needs_grad ? pre.raw_data() : nullptr;
  BURST_GPU_KERNEL(MatMul, gemm);

  shape.back() = down.value().dim(0);
  const Variable y = tape.Output(LinearForward(hidden, down, down_bias, residual, shape, use),
                                 {x, up, up_bias, down, down_bias, residual});
  if (!needs_grad) return y;

  // ddown += dy^T hidden, dpre = (dy down) gelu'(pre), dup_bias += sum of dpre,
  // dup += dpre^T x, dx += dpre up
  tape.Record("gelu_mlp", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    WeightBackward(dy, hidden, down, down_bias);
    const Tensor dpre = Tensor::EmptyLike(pre);
    MatMulParams gemm;
    gemm.a = AsMatrix(dy, down.value().dim(0));
    gemm.b = AsMatrix(down.value(), ffn);
    gemm.c = AsMatrix(dpre, ffn);
    gemm.epilogue = Epilogue::kGeluBackward;
    gemm.pre = pre.raw_data();
    BURST_GPU_KERNEL(MatMul, gemm);
    InputBackward(dpre, x, up);
    if (dx_done != nullptr) dx_done();
    WeightBackward(dpre, x.value(), up, up_bias);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

Variable LinearCrossEntropy(Tape& tape, const Variable& x, const Variable& weight,
                            const Tensor& targets, const LossTerms& terms, int64_t chunk) {
  constexpr int64_t kLogitBytes = int64_t{2} << 30;  // of one chunk, at most
  constexpr int64_t kRows = 256;                     // a multiple of every tile of a GEMM
  const int64_t vocab = weight.value().dim(0), width = weight.value().dim(1);
  const int64_t tokens = targets.numel();
  const DType dtype = x.value().dtype();
  const DType sum_dtype = dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
  const bool needs_grad = tape.NeedsGrad({x, weight});
  const bool dx_wanted = needs_grad && x.requires_grad();
  const bool dweight_wanted = needs_grad && weight.requires_grad();
  const Tensor dx = dx_wanted ? Tensor::EmptyLike(x.value()) : Tensor();

  // A vocabulary of an odd size (GPT-2's 50,257) would cost the GEMMs their fast kernels. So rows
  // of zeros are added; nobody reads their logits, and their gradients are zero.
  const int64_t align = 128 / SizeOf(dtype), stride = (vocab + align - 1) / align * align;
  Tensor padded_weight = weight.value();
  if (stride != vocab) {
    padded_weight = Tensor::Empty({stride, width}, dtype, DeviceType::kCuda);
    padded_weight.Slice(0, 0, vocab).CopyFrom(weight.value());
    padded_weight.Slice(0, vocab, stride - vocab).Fill(0);
  }
  Tensor padded_dweight;
  if (dweight_wanted) {
    padded_dweight = Tensor::Empty({stride, width}, sum_dtype, DeviceType::kCuda);
    if (tokens == 0) padded_dweight.Fill(0);
  }
  const Variable loss = tape.Output(Tensor::Empty({}, sum_dtype, DeviceType::kCuda), {x, weight});

  if (chunk == 0) {  // equal chunks: each reads and writes all of dweight
    const int64_t most = std::max(kRows, kLogitBytes / (stride * SizeOf(dtype)));
    const int64_t chunks = std::max<int64_t>(1, (tokens + most - 1) / most);
    chunk = ((tokens + chunks - 1) / chunks + kRows - 1) / kRows * kRows;
  }
  chunk = std::clamp<int64_t>(chunk, 1, std::max<int64_t>(1, tokens));
  const Tensor logits = Tensor::Empty({chunk, stride}, dtype, DeviceType::kCuda);
  const Tensor losses = Tensor::Empty({tokens}, sum_dtype, DeviceType::kCuda);
  const Matrix w = AsMatrix(padded_weight, width), all = AsMatrix(x.value(), width);
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t rows = std::min(chunk, tokens - begin);
    const Matrix x_rows = all.Rows(begin, begin + rows);
    const Matrix l{logits.raw_data(), dtype, rows, stride, stride, false};
    BURST_GPU_KERNEL(MatMul, MatMulParams{x_rows, w.Transposed(), l});
    BURST_GPU_KERNEL(SoftmaxCrossEntropy, logits, rows, vocab, stride,
                     static_cast<const int32_t*>(targets.raw_data()) + begin, terms, needs_grad,
                     static_cast<char*>(losses.raw_data()) + begin * SizeOf(sum_dtype));
    if (dx_wanted) {
      BURST_GPU_KERNEL(MatMul, MatMulParams{l, w, AsMatrix(dx, width).Rows(begin, begin + rows)});
    }
    if (dweight_wanted) {
      MatMulParams gemm{l.Transposed(), x_rows, AsMatrix(padded_dweight, width)};
      if (begin > 0) gemm.addend = gemm.c.data;
      BURST_GPU_KERNEL(MatMul, gemm);
    }
  }
  BURST_GPU_KERNEL(SumLosses, losses, terms.scale, loss.value());
  if (!needs_grad) return loss;

  tape.Record("cross_entropy", {loss}, [=] {
    const Tensor upstream = loss.grad();  // nearly always 1, which needs no scaling
    const Tensor dweight = dweight_wanted ? padded_dweight.Slice(0, 0, vocab) : Tensor();
    if (dx_wanted) {
      BURST_GPU_KERNEL(ScaleBy, dx, upstream);
      x.AddGrad(dx);
    }
    if (!dweight_wanted) return;
    if (weight.is_parameter()) {
      bool add = false;
      const Tensor& grad = weight.GradToWrite(&add);
      BURST_GPU_KERNEL(ScaleInto, grad, dweight, upstream, add);
    } else {
      BURST_GPU_KERNEL(ScaleBy, dweight, upstream);
      weight.AddGrad(dweight.To(dtype));
    }
  });
  return loss;
}

}  // namespace cuda
}  // namespace burst
