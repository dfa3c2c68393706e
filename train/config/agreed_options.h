// The options that must be equal in all processes of a job, for burst/comm/agreement.h.
#pragma once

#include <vector>

#include "burst/cli/options.h"
#include "burst/comm/agreement.h"

namespace burst {

// Returns the version, and all options whose scope says that they must agree. `one_host` says that
// all processes are on one host, so paths must agree, too.
std::vector<AgreedItem> AgreedOptions(const OptionTable& options, bool one_host);

// Returns whether all processes of this process's launcher are on one host.
bool LaunchIsOnOneHost();

}  // namespace burst
