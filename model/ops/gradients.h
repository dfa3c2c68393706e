// How a GPU's backwards hand their gradients on without passes over memory of their own.
#pragma once

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// The buffer that a parameter's gradient is added to; null when nobody wants it.
inline Tensor WantedGrad(const Variable& parameter) {
  return parameter.requires_grad() ? parameter.MutableGrad() : Tensor();
}

// For a backward that adds to the gradient that its input has already (the residual stream's) in
// the pass that computes its own: calls write(before, dx), which makes dx = before + its gradient.
// before is null where there is nothing to add to; dx is null when nobody wants it.
template <typename Write>
void AddGradInPassing(const Variable& x, Write write) {
  if (!x.requires_grad()) return write(Tensor(), Tensor());
  const Tensor dx = Tensor::EmptyLike(x.value());
  if (x.is_parameter()) {  // accumulated in its owner's buffer
    write(Tensor(), dx);
    x.AddGrad(dx);
    return;
  }
  write(x.grad().null() ? Tensor() : x.grad().Contiguous(), dx);
  x.SetGrad(dx);
}

}  // namespace burst
