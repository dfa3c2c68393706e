// Elementwise sum.
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

// y = a + b; one shape.
Variable Add(Tape& tape, const Variable& a, const Variable& b);

}  // namespace burst
