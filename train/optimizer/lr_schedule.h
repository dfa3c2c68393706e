// The learning rate as a pure function of the step.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

enum class LrShape {
  kCosine,    // half a cosine from lr to min_lr
  kLinear,    // a straight line from lr to min_lr
  kConstant,  // lr
  kWsd,       // warm-up, stable at lr, then a straight line to min_lr over the last fifth
};

absl::StatusOr<LrShape> ParseLrShape(absl::string_view name);  // "cosine", ...
const char* Name(LrShape shape);

struct LrSchedule {
  LrShape shape = LrShape::kCosine;
  double lr = 0;
  double min_lr = 0;
  int64_t warmup = 0;  // steps that rise in a straight line: (step + 1) / warmup of lr
  int64_t steps = 0;

  // For step in [0, steps). The rate would reach min_lr at step == steps; it stays there beyond.
  double operator()(int64_t step) const;
};

}  // namespace burst
