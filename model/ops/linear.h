// A dense layer: y = x W^T + bias + residual.
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

// x: [..., in], where `in` may be several trailing axes ([batch, length, heads, head_dim] counts as
// in = heads head_dim); weight: [out, in]; bias: [out] or undefined; residual, y: [..., out].
// The residual is added by the matrix product itself, which starts from it instead of from zero.
Variable Linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias = {},
                const Variable& residual = {});

}  // namespace burst
