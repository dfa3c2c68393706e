#include "train/optimizer/lr_schedule.h"

#include <algorithm>
#include <cmath>

#include "burst/base/enum_names.h"

namespace burst {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr double kWsdDecayFraction = 0.2;

constexpr EnumName<LrShape> kShapes[] = {{LrShape::kCosine, "cosine"},
                                         {LrShape::kLinear, "linear"},
                                         {LrShape::kConstant, "constant"},
                                         {LrShape::kWsd, "wsd"}};

}  // namespace

absl::StatusOr<LrShape> ParseLrShape(absl::string_view name) { return ParseName(name, kShapes); }
const char* Name(LrShape shape) { return NameOf(shape, kShapes); }

double LrSchedule::operator()(int64_t step) const {
  if (step < warmup) return lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  double decay_steps = static_cast<double>(steps - warmup);
  if (shape == LrShape::kWsd) {
    decay_steps = std::min(decay_steps, kWsdDecayFraction * static_cast<double>(steps));
  }
  // How far the decay has come, in [0, 1].
  double progress = 1;
  if (step < steps) {
    progress = std::max(0.0, 1 - static_cast<double>(steps - step) / decay_steps);
  }
  switch (shape) {
    case LrShape::kConstant:
      return lr;
    case LrShape::kCosine:
      return min_lr + (lr - min_lr) * 0.5 * (1 + std::cos(kPi * progress));
    case LrShape::kLinear:
    case LrShape::kWsd:
      return min_lr + (lr - min_lr) * (1 - progress);
  }
  return lr;
}

}  // namespace burst
