#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/norm.cuh"

namespace burst {
namespace cuda {

void LayerNormForward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                      const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args;
    args.rows = rstd.numel();
    args.width = static_cast<int>(width);
    args.eps = static_cast<Accumulator<T>>(eps);
    args.x = Data<T>(x);
    args.weight = Data<T>(weight);
    args.bias = Data<T>(bias);
    args.mean = Data<Accumulator<T>>(mean);
    args.rstd = Data<Accumulator<T>>(rstd);
    args.y = Data<T>(y);
    LaunchNormForward<T, /*kCenter=*/true>(args, FitsVectors(width, {x, weight, bias, y}));
  });
}

void LayerNormBackward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                       const Tensor& rstd, const Tensor& dy, const Tensor& before, const Tensor& dx,
                       const ParameterGrad& dweight, const ParameterGrad& dbias) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args;
    args.rows = rstd.numel();
    args.width = static_cast<int>(width);
    args.x = Data<T>(x);
    args.weight = Data<T>(weight);
    args.mean = Data<Accumulator<T>>(mean);
    args.rstd = Data<Accumulator<T>>(rstd);
    args.dy = Data<T>(dy);
    args.before = Data<T>(before);
    args.dx = Data<T>(dx);
    LaunchNormBackward<T, /*kCenter=*/true>(args, FitsVectors(width, {x, weight, dy, before, dx}),
                                            {dweight, dbias});
  });
}

}  // namespace cuda
}  // namespace burst
