// Compares the processes of a run before they train together. Ranks with other options, another
// model, other data or another checkpoint would train a wrong model. Each function is collective.
// Every rank gets the same error, which names the difference and both values.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "train/config/config.h"
#include "train/run/setup.h"

namespace burst {

// Compares the version and the options that must agree, before anything is loaded.
absl::Status AgreeOnOptions(const ResolvedConfig& config, Communicator* comm);

// Compares the model, the weights from which a new run starts, the data and the tokenizer.
absl::Status AgreeOnSetup(const TrainingSetup& setup, Communicator* comm);

// Compares the checkpoint from which the run continues, because a host may see an older one.
absl::Status AgreeOnCheckpoint(const TrainingSetup& setup, Communicator* comm);

}  // namespace burst
