#include <cmath>

#include "burst/base/parallel.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/gradients.h"
#include "model/ops/ops.h"

namespace burst {

// ---- RMSNorm.

namespace {

// rstd = 1 / sqrt(mean(x^2) + eps), y = x rstd (offset + weight). x, y: [rows, width], rstd: [rows]
template <typename T>
void RmsNormForward(int64_t rows, int64_t width, const T* x, const T* weight, double offset,
                    double eps, T* y, T* rstd) {
  const auto w = AsArray(weight, width) + T(offset);
  ParallelFor(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = AsArray(x + i * width, width);
      rstd[i] = 1 / std::sqrt(row.square().sum() / T(width) + T(eps));
      AsArray(y + i * width, width) = row * w * rstd[i];
    }
  });
}

// With xhat = x rstd and g = dy (offset + weight):
// dx += rstd (g - xhat mean(g xhat)), dweight += sum over rows of dy xhat
template <typename T>
void RmsNormBackward(int64_t rows, int64_t width, const T* x, const T* weight, double offset,
                     const T* rstd, const T* dy, T* dx, T* dweight) {
  const auto w = AsArray(weight, width) + T(offset);
  SumOverRowBlocks(rows, width, dweight, [&](int64_t begin, int64_t end, T* partial) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = AsArray(x + i * width, width);
      const auto grad = AsArray(dy + i * width, width);
      const T mean = (grad * w * row).sum() * rstd[i] / T(width);
      AsArray(dx + i * width, width) += rstd[i] * (grad * w - row * (rstd[i] * mean));
      AsArray(partial, width) += grad * row * rstd[i];
    }
  });
}

}  // namespace

namespace {

// The result of a normalization, of x's shape.
Variable NormOutput(Tape& tape, std::initializer_list<Variable> inputs, LinearPrecision reader) {
  const Tensor& x = inputs.begin()->value();
  if (reader != LinearPrecision::kFloat8) return tape.Output(Tensor::EmptyLike(x), inputs);
  BURST_CHECK(x.device() == DeviceType::kCuda) << "float8 is for GPUs";
  return tape.Output(Tensor::Empty(x.shape(), DType::kFloat8E4M3, x.device()), inputs,
                     Tensor::Empty({1}, DType::kFloat32, x.device()));
}

}  // namespace

Variable RmsNorm(Tape& tape, const Variable& x, const Variable& weight, double eps,
                 LinearPrecision reader, double offset) {
  const int64_t width = x.value().dim(-1), rows = x.value().numel() / width;
  BURST_CHECK(weight.shape() == Shape({width}) && x.value().is_contiguous());
  const Variable y = NormOutput(tape, {x, weight}, reader);
  const bool on_gpu = x.value().device() == DeviceType::kCuda;
  const Tensor rstd = Tensor::Empty({rows}, SumDType(x.value().dtype()), x.value().device());
  if (on_gpu) {
    BURST_GPU_KERNEL(RmsNormForward, x.value(), weight.value(), offset, eps, y.value(), y.scale(),
                     rstd);
  } else {
    DispatchComputed(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      RmsNormForward<T>(rows, width, ReadAs<T>(x.value()), ReadAs<T>(weight.value()), offset, eps,
                        WriteAs<T>(y.value()), rstd.data<T>());
    });
  }
  if (!tape.NeedsGrad({x, weight})) return y;

  tape.Record("rmsnorm", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    if (on_gpu) {
      const GradInPassing dx(x, reader == LinearPrecision::kFloat8);
      BURST_GPU_KERNEL(RmsNormBackward, x.value(), weight.value(), offset, rstd, dy, dx.before(),
                       dx.sum(), dx.amax(), WantedGrad(weight));
      return dx.Set();
    }
    DispatchComputed(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      RmsNormBackward<T>(rows, width, ReadAs<T>(x.value()), ReadAs<T>(weight.value()), offset,
                         rstd.data<T>(), ReadAs<T>(dy), UpdateAs<T>(GradBuffer(x)),
                         UpdateAs<T>(GradBuffer(weight)));
    });
  });
  return y;
}

// ---- LayerNorm.

namespace {

// rstd = 1 / sqrt(mean((x - mean)^2) + eps), y = (x - mean) rstd weight + bias.
// x, y: [rows, width], mean, rstd: [rows]
template <typename T>
void LayerNormForward(int64_t rows, int64_t width, const T* x, const T* weight, const T* bias,
                      double eps, T* y, T* mean, T* rstd) {
  const auto w = AsArray(weight, width), b = AsArray(bias, width);
  ParallelFor(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = AsArray(x + i * width, width);
      mean[i] = row.sum() / T(width);
      rstd[i] = 1 / std::sqrt((row - mean[i]).square().sum() / T(width) + T(eps));
      AsArray(y + i * width, width) = (row - mean[i]) * rstd[i] * w + b;
    }
  });
}

// With xhat = (x - mean) rstd and g = dy weight:
// dx += rstd (g - mean(g) - xhat mean(g xhat)), dweight += sum of dy xhat, dbias += sum of dy
template <typename T>
void LayerNormBackward(int64_t rows, int64_t width, const T* x, const T* weight, const T* mean,
                       const T* rstd, const T* dy, T* dx, T* dweight, T* dbias) {
  const auto w = AsArray(weight, width);
  const Tensor sums = Tensor::Zeros({2, width}, DTypeOf<T>::value);  // dweight, dbias
  SumOverRowBlocks(rows, 2 * width, sums.data<T>(), [&](int64_t begin, int64_t end, T* partial) {
    for (int64_t i = begin; i < end; ++i) {
      const auto xhat = (AsArray(x + i * width, width) - mean[i]) * rstd[i];
      const auto grad = AsArray(dy + i * width, width);
      const T mean_g = (grad * w).sum() / T(width);
      const T mean_g_xhat = (grad * w * xhat).sum() / T(width);
      AsArray(dx + i * width, width) += rstd[i] * (grad * w - mean_g - xhat * mean_g_xhat);
      AsArray(partial, width) += grad * xhat;
      AsArray(partial + width, width) += grad;
    }
  });
  AsArray(dweight, width) += AsArray(sums.data<T>(), width);
  AsArray(dbias, width) += AsArray(sums.data<T>() + width, width);
}

}  // namespace

Variable LayerNorm(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                   double eps, LinearPrecision reader) {
  const int64_t width = x.value().dim(-1), rows = x.value().numel() / width;
  BURST_CHECK(weight.shape() == Shape({width}) && bias.shape() == weight.shape() &&
              x.value().is_contiguous());
  const Variable y = NormOutput(tape, {x, weight, bias}, reader);
  const bool on_gpu = x.value().device() == DeviceType::kCuda;
  const Tensor mean = Tensor::Empty({rows}, SumDType(x.value().dtype()), x.value().device());
  const Tensor rstd = Tensor::EmptyLike(mean);
  if (on_gpu) {
    BURST_GPU_KERNEL(LayerNormForward, x.value(), weight.value(), bias.value(), eps, y.value(),
                     y.scale(), mean, rstd);
  } else {
    DispatchComputed(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      LayerNormForward<T>(rows, width, ReadAs<T>(x.value()), ReadAs<T>(weight.value()),
                          ReadAs<T>(bias.value()), eps, WriteAs<T>(y.value()), mean.data<T>(),
                          rstd.data<T>());
    });
  }
  if (!tape.NeedsGrad({x, weight, bias})) return y;

  tape.Record("layernorm", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    if (on_gpu) {
      const GradInPassing dx(x, reader == LinearPrecision::kFloat8);
      BURST_GPU_KERNEL(LayerNormBackward, x.value(), weight.value(), mean, rstd, dy, dx.before(),
                       dx.sum(), dx.amax(), WantedGrad(weight), WantedGrad(bias));
      return dx.Set();
    }
    DispatchComputed(x.value().dtype(), [&](auto zero) {
      using T = decltype(zero);
      LayerNormBackward<T>(rows, width, ReadAs<T>(x.value()), ReadAs<T>(weight.value()),
                           mean.data<T>(), rstd.data<T>(), ReadAs<T>(dy),
                           UpdateAs<T>(GradBuffer(x)), UpdateAs<T>(GradBuffer(weight)),
                           UpdateAs<T>(GradBuffer(bias)));
    });
  });
  return y;
}

}  // namespace burst
