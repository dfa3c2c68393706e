// Refuses a run that does not fit into memory, before its first step.
#pragma once

#include "absl/status/status.h"
#include "train/run/setup.h"

namespace burst {

// For a run on GPUs, before its ranks start; in one process of it. ResourceExhausted, with what to
// change, for a step that does not fit into the memory that is free on the calling thread's GPU.
// Fills setup->plan. Runs of more than 32 ranks are not looked at.
absl::Status CheckRunFits(TrainingSetup* setup);

// For a run on CPUs: ResourceExhausted if the parameters alone, with their gradients and moments,
// need more memory than this host has to give (FreeHostMemory).
absl::Status CheckStateFits(const TrainingSetup& setup);

// The one of the two that suits the device; nothing with --noplan. RunTraining calls it.
absl::Status CheckMemory(TrainingSetup* setup);

}  // namespace burst
