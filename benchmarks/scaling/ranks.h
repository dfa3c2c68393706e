// Starts the ranks of the experiments.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/device/device.h"

namespace burst {

// Runs body(communicator) on ranks and returns the first error. Without `processes`, ranks are
// threads of this process: on the CPU with a pool of `threads` each, on cuda with a GPU each. With
// `share_gpus` and fewer GPUs than ranks, ranks share the GPUs. With `processes`, ranks are the
// first `ranks` processes, and the others return at once. The call is then collective.
absl::Status RunBenchmarkRanks(DeviceType device, int ranks, int threads, bool share_gpus,
                               Communicator* processes,
                               const std::function<absl::Status(Communicator&)>& body);

}  // namespace burst
