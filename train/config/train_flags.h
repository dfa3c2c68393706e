// The options of //train: abseil flags, a field of TrainConfig each.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "burst/cli/flags.h"
#include "train/config/config.h"

namespace burst {

// The command line over the --config file over, with --resume, the configuration of the run in
// --out over the defaults.
absl::StatusOr<TrainConfig> TrainConfigFromArguments(int argc, char** argv);

std::string TrainHelp();

}  // namespace burst
