// Connects the processes of a launcher as ranks, for programs that need only a communicator.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/device/device.h"

namespace burst {

// The processes that mpirun, torchrun or srun started, including this one. On cuda they use NCCL
// and a GPU each, to which the calling thread is bound while this lives. Else they use sockets.
class LaunchedRanks {
 public:
  // Collective; null if no launcher started more than one.
  static absl::StatusOr<std::unique_ptr<LaunchedRanks>> Connect(DeviceType device);
  Communicator& comm() { return *comm_; }

 private:
  std::optional<ScopedCudaDevice> gpu_;
  std::unique_ptr<Communicator> comm_;
};

}  // namespace burst
