// The feed-forward of GPT-2 in one op, so that a GPU's products can take GELU and the biases along.
#pragma once

#include <functional>

#include "burst/autograd/tape.h"

namespace burst {

// y = gelu(x up^T + up_bias) down^T + down_bias + residual. x, residual, y: [..., width]; up: [ffn,
// width], down: [width, ffn]; down_bias and residual may be undefined. GELU as in gelu.h, dx_done
// as in linear.h.
Variable GeluMlp(Tape& tape, const Variable& x, const Variable& up, const Variable& up_bias,
                 const Variable& down, const Variable& down_bias, const Variable& residual = {},
                 const std::function<void()>& dx_done = nullptr);

}  // namespace burst
