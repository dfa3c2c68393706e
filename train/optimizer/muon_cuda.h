// The memory-bound kernels of Muon on a GPU. train/optimizer/muon.cc has the formulas, and the
// GEMMs between the kernels. All tensors are on the GPU.
#pragma once

#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// m <- momentum m + (1 - momentum) s g,   u <- momentum m + (1 - momentum) s g,   s = grad_scale
//
// All [n], float32 or float64; grad_scale: [1]. Unless loss and norm, [2] float64, are finite, m
// stays what it is, and u has no meaning.
void MuonDirection(double momentum, const Tensor& grad_scale, const Tensor& loss_and_norm,
                   const Tensor& g, const Tensor& m, const Tensor& u);

// x <- u / norm, or zeros for a norm of 0. u: [n], x: [n] of u's type or bfloat16; norm: [1]
// float64.
void DivideByNorm(const Tensor& u, const Tensor& norm, const Tensor& x);

// y <- a y + b x. x, y: [n] of one type.
void AddScaled(double a, const Tensor& y, double b, const Tensor& x);

// p <- keep p - step x, and compute, unless null, becomes p, rounded. p: [n] float32 or float64; x:
// [n] of p's type or bfloat16. Unless loss and norm are finite, nothing changes.
void ApplyMuon(double keep, double step, const Tensor& loss_and_norm, const Tensor& x,
               const Tensor& p, const Tensor& compute);

}  // namespace cuda
}  // namespace burst
