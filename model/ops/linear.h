// A dense layer: y = x W^T + bias + residual.
#pragma once

#include <functional>

#include "burst/autograd/tape.h"

namespace burst {

// x: [..., in], where `in` may be several trailing axes ([batch, length, heads, head_dim] counts as
// in = heads head_dim); weight: [out, in]; bias: [out] or undefined; residual, y: [..., out].
// The residual is added by the matrix product itself, which starts from it instead of from zero.
//
// `dx_done`, unless null, is called in the backward when dx is complete and before x is read for
// dweight: the caller may send dx from there, and put x back (Variable::SetValue).
Variable Linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias = {},
                const Variable& residual = {}, const std::function<void()>& dx_done = nullptr);

}  // namespace burst
