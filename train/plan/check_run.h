// Refuses a run that does not fit into memory, before its first step.
#pragma once

#include "absl/status/status.h"
#include "train/run/setup.h"

namespace burst {

// Checks a run on GPUs before its ranks start, in one of its processes. ResourceExhausted says what
// to change if a step does not fit into the free memory of the calling thread's GPU. Fills
// setup->plan. Runs of more than 32 ranks are not checked.
absl::Status CheckRunFits(TrainingSetup* setup);

// Checks a run on CPUs. ResourceExhausted means that this host has too little free memory
// (FreeHostMemory). Counted are the parameters with gradients and moments, and the least that
// layers keep for the backward.
absl::Status CheckStateFits(const TrainingSetup& setup);

// Makes the check for the device, or none with --noplan. RunTraining calls it.
absl::Status CheckMemory(TrainingSetup* setup);

}  // namespace burst
