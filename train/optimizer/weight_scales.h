// The scales of weights that travel in e4m3 while their values are divided (ZeRO-3). A scale is of
// the whole weight, so a rank rounds its piece to the bytes of the whole weight's rounding.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "model/ops/cuda/float8_weights.h"
#include "model/parameters.h"

namespace burst {

class WeightScales {
 public:
  // parameters: their float8_weights() on a GPU. ranks: divide the values. Both must outlive the
  // object.
  WeightScales(const ParameterList& parameters, Communicator* ranks);

  // Finds the scales of the values as they are now: a pass over this rank's pieces and an exchange
  // of their largest magnitudes. Collective in the ranks.
  absl::Status Find();
  // Returns the scale of float8_weights()[slot], [1] float32. The tensor is the same after each
  // Find.
  Tensor Of(int slot) const { return scales_.Slice(0, slot * cuda::kScaleRow, 1); }

 private:
  const ParameterList& parameters_;
  Communicator* const ranks_;
  // The largest magnitudes, [float8_weights] and [ranks, float8_weights], and the scales.
  const Tensor own_, of_ranks_, scales_;
};

}  // namespace burst
