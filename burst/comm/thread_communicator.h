// Ranks as threads of this process: the in-process ring behind `--ranks`.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"

namespace burst {

// Runs body(communicator) on `world_size` threads, one a rank, and waits for all of them. When a
// body returns an error the others are aborted; the first error by time is returned.
absl::Status RunRanks(int world_size, const std::function<absl::Status(Communicator&)>& body);

}  // namespace burst
