// In place of nccl_communicator.cc in a build without CUDA.
#include "burst/comm/nccl/nccl_communicator.h"

namespace burst {
namespace {

absl::Status NoCuda() {
  return absl::UnimplementedError(
      "this build has no CUDA: install the CUDA toolkit with NCCL and build again");
}

}  // namespace

absl::Status RunCudaRanks(int, const std::function<absl::Status(Communicator&)>&) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const ProcessLaunch&) {
  return NoCuda();
}

absl::StatusOr<int> GpuOfProcess(const ProcessLaunch&) { return NoCuda(); }

}  // namespace burst
