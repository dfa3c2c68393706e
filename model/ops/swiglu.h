// SwiGLU (Shazeer, arXiv 2002.05202).
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

// y = gate sigmoid(gate) up, elementwise; any one shape.
Variable SwiGlu(Tape& tape, const Variable& gate, const Variable& up);

}  // namespace burst
