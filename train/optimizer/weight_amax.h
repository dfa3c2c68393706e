// Keeps the largest magnitudes of the weights that passes read in e4m3 (ParameterList::amax). An
// update of AdamW finds them while it writes the weights. A pass over the weights finds them after
// any other change: a start, an import, an update by Muon, averaged weights.
//
// Ranks that divide a state find the magnitudes of their pieces, and exchange them. On GPUs only.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "model/parameters.h"

namespace burst {

class WeightAmax {
 public:
  // ranks: those that divide the state; null: none do. All must outlive the object.
  WeightAmax(ParameterList* parameters, Communicator* ranks);

  // Returns where an update leaves the magnitudes of this rank's pieces, [float8_weights] float32.
  // Null if they are not known before it, because an update may be skipped and change nothing.
  Tensor OwnForUpdate() const { return parameters_.amax().null() ? Tensor() : own_; }
  // Makes the magnitudes known after an update. `found`: it left them in OwnForUpdate. Collective
  // in the ranks.
  absl::Status AfterUpdate(bool found) { return found ? Exchange() : Find(); }
  // Makes the magnitudes known by a pass over the weights. Collective in the ranks.
  absl::Status Find();

  // Returns the scale of a weight in e4m3, [1] float32, from its known magnitude; with ranks.
  // slot: its place in float8_weights.
  Tensor Scale(int slot) const { return scales_.Slice(0, slot, 1); }

 private:
  absl::Status Exchange();

  ParameterList& parameters_;
  Communicator* const ranks_;
  Tensor own_, of_ranks_, amax_, scales_;  // all but the first are null without ranks
};

}  // namespace burst
