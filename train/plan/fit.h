// Chooses options that trade time for memory, by planning a step with each of them.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "train/config/memory_options.h"
#include "train/plan/plan.h"

namespace burst {

struct FittedPlan {
  std::string options;    // the choice: "--zero=3 --recompute=selective"; empty: nothing
  ResolvedConfig config;  // with the choice
  StepPlan plan;
};

// Returns the fastest step that fits; if none fits, the step that needs least. `setup` and
// `gpus_per_node` are as for PlanStep.
absl::StatusOr<FittedPlan> FitStep(const TrainingSetup& setup, const GpuModel& gpu,
                                   int gpus_per_node, const MayChoose& may_choose);

// Returns ResourceExhausted if a step needs more memory than a GPU has, or more than its share of
// the host. The message names the fewest options to change so that it fits, or the least memory
// that it needs. If half a minute does not find the fewest options, it names some. With an
// offloaded optimizer it also says how much of it has room on the GPU. `plan` is the step's.
absl::Status CheckFits(const TrainingSetup& setup, const StepPlan& plan, const GpuModel& gpu,
                       int gpus_per_node);

}  // namespace burst
