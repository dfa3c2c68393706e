// SwiGLU (Shazeer, arXiv 2002.05202).
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

// y = gate sigmoid(gate) up, elementwise. gate_up: [..., 2 n], gate before up; y: [..., n].
Variable SwiGlu(Tape& tape, const Variable& gate_up);

}  // namespace burst
