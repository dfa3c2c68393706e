// GELU in the tanh form of GPT-2 (Hendrycks and Gimpel, arXiv 1606.08415).
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

// y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), elementwise; any shape.
Variable Gelu(Tape& tape, const Variable& x);

}  // namespace burst
