// The options that the processes of a job must have alike, for burst/comm/agreement.h.
#pragma once

#include <vector>

#include "burst/cli/options.h"
#include "burst/comm/agreement.h"

namespace burst {

// The version, and all options whose scope says so. `one_host`: all processes are on one host, so
// that paths must agree as well.
std::vector<AgreedItem> AgreedOptions(const OptionTable& options, bool one_host);

// Whether the processes of this one's launcher are on one host.
bool LaunchIsOnOneHost();

}  // namespace burst
