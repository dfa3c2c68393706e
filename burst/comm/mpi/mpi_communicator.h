// Ranks as processes under mpirun (Open MPI).
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"

namespace burst {

// Initialises MPI on the first call and returns the communicator of all processes; MPI is finalised
// at exit. Without mpirun it is a world of one rank. Unimplemented in a build without MPI.
absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator();

}  // namespace burst
