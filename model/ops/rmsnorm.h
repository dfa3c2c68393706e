// RMSNorm (Zhang and Sennrich, arXiv 1910.07467).
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

// y = x / sqrt(mean(x^2) + eps) * weight over the last axis. x, y: [..., width], weight: [width].
Variable RmsNorm(Tape& tape, const Variable& x, const Variable& weight, double eps);

}  // namespace burst
