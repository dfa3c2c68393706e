// Ranks as threads of this process: the in-process ring behind `--ranks`.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"

namespace burst {

// Runs body(communicator) on `world_size` threads, one a rank, and waits for all of them. When a
// body returns an error the others are aborted; the first error by time is returned. `on_failure`
// is told what the others' calls will return, on the thread of the rank that fails and before any
// of them does; it must return at once and call no communicator.
//
// GPU memory is carried too, between ranks of one GPU or of several, with a host wait for each
// message: for tests, and for more ranks than GPUs. The bodies bind themselves (ScopedCudaDevice).
absl::Status RunRanks(int world_size, const std::function<absl::Status(Communicator&)>& body,
                      const std::function<void(const absl::Status& failure)>& on_failure = nullptr);

}  // namespace burst
