// StateExchange: what the ranks of a run exchange in a step. Gradients are reduced over the ranks
// after a backward, and values follow an update.
#pragma once

#include "absl/status/status.h"
#include "burst/tensor/tensor.h"

namespace burst {

class StateExchange {
 public:
  virtual ~StateExchange() = default;

  // Begins a step: the gradients that follow take the place of those so far.
  virtual void BeginStep() = 0;
  // Says that the gradients of the parameters [first, last) are complete; they may not be touched
  // until Finish returns. Their reduction may begin.
  virtual absl::Status Post(int first, int last) = 0;
  // Completes the reductions. norm, [1] float64 on the gradients' device, becomes that of the whole
  // model's gradient, the same bits on every rank.
  virtual absl::Status Finish(const Tensor& norm) = 0;
  // Gives every rank all values, after an update of its part of them.
  virtual absl::Status GatherValues() = 0;
};

}  // namespace burst
