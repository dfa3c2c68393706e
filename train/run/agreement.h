// What the processes of a run compare before they train together: ranks with other options, another
// model, other data or another checkpoint would train a model that nobody asked for. Each is
// collective; every rank gets the same error, which names what differs and both values.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "train/config/config.h"
#include "train/run/setup.h"

namespace burst {

// The version, and the options that must be alike; before anything is loaded.
absl::Status AgreeOnOptions(const ResolvedConfig& config, Communicator* comm);

// The model, the weights that a new run starts from, the data and the tokenizer.
absl::Status AgreeOnSetup(const TrainingSetup& setup, Communicator* comm);

// The checkpoint that is continued: a host may see an older one.
absl::Status AgreeOnCheckpoint(const TrainingSetup& setup, Communicator* comm);

}  // namespace burst
