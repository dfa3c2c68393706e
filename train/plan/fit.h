// Options of a step that trade time for memory, chosen by planning the step with each of them.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "train/plan/plan.h"

namespace burst {

// Which options may be chosen; the others stay.
struct Choices {
  bool zero = false, recompute = false, ffn_chunk = false, head_chunk = false, offload = false;
};

struct FittedPlan {
  std::string options;  // what was chosen: "--zero=3 --recompute=selective"; empty: nothing
  StepPlan plan;
};

// `setup` and `gpus_per_node`: as PlanStep's.
//
// The fastest step that fits; if none does, the one that needs least.
absl::StatusOr<FittedPlan> FitStep(const TrainingSetup& setup, const GpuModel& gpu,
                                   int gpus_per_node, const Choices& choices);

// ResourceExhausted for a step that needs more memory than a GPU has, or more than its share of the
// host. The message names the fewest options to change so that it fits (or some, if half a minute
// does not find them), or the least memory it needs. `plan`: the step's.
absl::Status CheckFits(const TrainingSetup& setup, const StepPlan& plan, const GpuModel& gpu,
                       int gpus_per_node);

}  // namespace burst
