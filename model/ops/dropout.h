// Dropout (Srivastava et al., JMLR 2014) whose masks are a pure function of where they apply, so
// that they are the same for any number of ranks and after a resume, and need not be saved.
#pragma once

#include <cstdint>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Names the random bits of a forward pass: dropout is a function of (key, site, batch row, global
// position, channel), the same for any number of ranks.
struct DropoutKey {
  uint64_t seed = 0;
  uint64_t step = 0;  // distinct for every micro-batch of the run
  bool enabled = false;
  int64_t first_row = 0;  // of the micro-batch, that this rank's batch begins with
};

// One place in the model where dropout applies.
struct DropoutSite {
  double rate = 0;  // in [0, 1)
  DropoutKey key;
  int64_t site = 0;  // distinct for every place of one forward pass
  Tensor positions;  // [length] int32: global, of this rank's tokens; on the activations' device

  bool active() const { return key.enabled && rate > 0; }
};

// y = residual + mask x / (1 - rate), where mask is 1 with probability 1 - rate, else 0. Without a
// residual: y = mask x / (1 - rate). mask = 1 and rate = 0 when the site is not active.
// x, residual, y: [batch, length, width].
Variable Dropout(Tape& tape, const Variable& x, const DropoutSite& site,
                 const Variable& residual = {});

}  // namespace burst
