// Ranks as threads of this process, in shared memory: what `--ranks` starts on a CPU.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"

namespace burst {

// Runs body(communicator) on `world_size` threads, one per rank, and waits for all of them. When a
// body returns an error or throws, the other ranks' calls return Unavailable, and RunRanks returns
// the first error by time. InvalidArgument if world_size < 1. `on_failure` receives the error that
// the other ranks' calls will return. The failed rank's thread calls it before any of these calls
// returns; it must return at once and not use a communicator.
//
// GPU memory is carried too, between ranks on one GPU or on several. The host then waits for each
// message, so this is for tests and for more ranks than GPUs. A body binds its own thread to a GPU
// (ScopedCudaDevice).
absl::Status RunRanks(int world_size, const std::function<absl::Status(Communicator&)>& body,
                      const std::function<void(const absl::Status& failure)>& on_failure = nullptr);

}  // namespace burst
