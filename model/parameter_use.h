// Who keeps a model's values or gradients elsewhere between their uses is told of these, unit by
// unit (ParameterList::units). A unit's values may be used several times in a pass. What fails goes
// to the tape; even then there is memory to compute with.
#pragma once

#include "burst/autograd/tape.h"

namespace burst {

class ParameterUse {
 public:
  virtual ~ParameterUse() = default;

  // The pass computes with the values of `unit` from here on, and later with those of `next`
  // (-1: none, or they are there); until EndValues(unit).
  virtual void BeginValues(Tape& tape, int unit, int next) = 0;
  virtual void EndValues(int unit) = 0;
  // The backward adds to the unit's gradients from here on; has added all that there is to add.
  virtual void BeginGrads(int unit) = 0;
  virtual void EndGrads(Tape& tape, int unit) = 0;
};

}  // namespace burst
