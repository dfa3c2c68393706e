// How the backwards on a GPU accumulate gradients without reading memory once more.
#pragma once

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/ops/cuda/kernels.h"

namespace burst {

// Where a parameter's gradient goes. What is given here must be written to.
inline cuda::ParameterGrad WantedGrad(const Variable& parameter) {
  cuda::ParameterGrad grad;
  if (parameter.requires_grad()) grad.sum = parameter.GradToWrite(&grad.add);
  return grad;
}

// For a backward whose kernel computes sum = before + its contribution in one pass, `before` being
// the gradient that the input (the residual stream) has already.
//
//   GradInPassing dx(x);
//   Kernel(..., dx.before(), dx.sum());
//   dx.Set();
class GradInPassing {
 public:
  // With `find_amax` the kernel also finds the sum's largest magnitude.
  explicit GradInPassing(const Variable& x, bool find_amax = false) : x_(x) {
    if (!x.requires_grad()) return;
    sum_ = Tensor::EmptyLike(x.value());
    if (find_amax) amax_ = Tensor::Empty({1}, DType::kFloat32, x.value().device());
    if (!x.is_parameter() && !x.grad().null()) before_ = x.grad().Contiguous();
  }
  const Tensor& before() const { return before_; }  // null: nothing to add to
  const Tensor& sum() const { return sum_; }        // null: x requires no gradient
  const Tensor& amax() const { return amax_; }      // null: not wanted
  void Set() const {
    if (!x_.requires_grad()) return;
    if (x_.is_parameter()) {  // accumulated in its owner's buffer
      x_.AddGrad(sum_);
    } else {
      x_.SetGrad(sum_, amax_);
    }
  }

 private:
  const Variable x_;
  Tensor before_, sum_, amax_;
};

}  // namespace burst
