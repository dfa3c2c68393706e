// In place of nccl_communicator.cc in a build without CUDA.
#include "burst/comm/nccl_communicator.h"

namespace burst {

absl::Status RunCudaRanks(int, const std::function<absl::Status(Communicator&)>&) {
  return absl::UnimplementedError(
      "this build has no CUDA: install the CUDA toolkit with NCCL and build again");
}

}  // namespace burst
