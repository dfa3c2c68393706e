// Replaces mpi_communicator.cc in a build without MPI.
#include "burst/comm/mpi/mpi_communicator.h"

namespace burst {

absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator() {
  return absl::UnimplementedError(
      "this build has no MPI: install Open MPI (libopenmpi-dev, openmpi-bin) and build again");
}

}  // namespace burst
