// Ranks with a simulated GPU each (burst/device/simulated_gpu.h), as threads of one process.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/device/simulated_gpu.h"

namespace burst {

// Runs body(communicator, GPU) for every rank on a thread that is bound to the rank's GPU, as
// RunRanks does. The host's messages arrive; those of GPU memory take time. If one side comes late
// to a message, the message and the waiting rank are late as well. `ranks_per_node`: the number of
// ranks that the links connect; messages between others use the network. 0: all ranks.
absl::Status RunSimulatedRanks(
    int ranks, int ranks_per_node, const GpuModel& model,
    const std::function<absl::Status(Communicator&, SimulatedGpu&)>& body);

}  // namespace burst
