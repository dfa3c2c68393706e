// LayerNorm (Ba et al., arXiv 1607.06450).
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last axis, with the biased
// variance. x, y: [..., width], weight, bias: [width].
Variable LayerNorm(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                   double eps);

}  // namespace burst
