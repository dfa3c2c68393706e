#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/norm.cuh"

namespace burst {
namespace cuda {

void RmsNormForward(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                    const Tensor& rstd) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args;
    args.rows = rstd.numel();
    args.width = static_cast<int>(width);
    args.eps = static_cast<Accumulator<T>>(eps);
    args.x = Data<T>(x);
    args.weight = Data<T>(weight);
    args.rstd = Data<Accumulator<T>>(rstd);
    args.y = Data<T>(y);
    LaunchNormForward<T, /*kCenter=*/false>(args, FitsVectors(width, {x, weight, y}));
  });
}

void RmsNormBackward(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                     const Tensor& before, const Tensor& dx, const ParameterGrad& dweight) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args;
    args.rows = rstd.numel();
    args.width = static_cast<int>(width);
    args.x = Data<T>(x);
    args.weight = Data<T>(weight);
    args.rstd = Data<Accumulator<T>>(rstd);
    args.dy = Data<T>(dy);
    args.before = Data<T>(before);
    args.dx = Data<T>(dx);
    LaunchNormBackward<T, /*kCenter=*/false>(args, FitsVectors(width, {x, weight, dy, before, dx}),
                                             {dweight});
  });
}

}  // namespace cuda
}  // namespace burst
