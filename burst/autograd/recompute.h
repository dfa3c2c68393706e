// Recomputation in the backward, also called gradient checkpointing (Chen et al., "Training Deep
// Nets with Sublinear Memory Cost", arXiv 1604.06174): of a part of a model its input is kept, and
// what happens between input and output is computed once more when the backward gets there.
#pragma once

#include <functional>

#include "burst/autograd/tape.h"

namespace burst {

// y = function(tape, x): its ops go onto the tape they are given, and may read parameters besides
// x.
using TapeFunction = std::function<Variable(Tape& tape, const Variable& x)>;

// function(tape, x) as one node of the tape, which keeps x and what the function itself holds. The
// function runs twice: now, on a tape that is thrown away, and in the backward, on a second one,
// for its gradients. Both times it must compute the same: random numbers are to be functions of a
// key, and messages to other ranks are sent twice. On a tape that does not record it runs once, as
// it is.
//
// Values and gradients are, to the bit, those without recomputation, as far as the ops themselves
// are reproducible. A watcher of the tape sees the function's values both times, so it may change
// them. What the function reports with Tape::Fail is reported to the tape.
Variable RecomputeInBackward(Tape& tape, const Variable& x, TapeFunction function);

}  // namespace burst
