// Ranks as processes under mpirun (Open MPI). Host memory only: no way to send GPU memory.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"

namespace burst {

// Returns the communicator of all processes. The first call initializes MPI; MPI is finalized at
// exit. Without mpirun there is one rank. Errors: FailedPrecondition if the launcher belongs to
// another MPI, Unavailable if MPI fails, Unimplemented in a build without MPI.
absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator();

}  // namespace burst
