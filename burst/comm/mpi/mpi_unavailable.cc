// Replaces mpi_communicator.cc in a build without MPI.
#include "burst/comm/mpi/mpi_communicator.h"

namespace burst {

absl::StatusOr<std::unique_ptr<Communicator>> CreateMpiCommunicator() {
  return absl::UnimplementedError(
      "this build has no MPI: run third_party/install.sh --mpi, and build again");
}

}  // namespace burst
