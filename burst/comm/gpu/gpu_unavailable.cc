// Replaces gpu_communicator.cc in a build without CUDA.
#include "burst/comm/gpu/gpu_communicator.h"

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

absl::StatusOr<std::unique_ptr<Communicator>> CreateGpuCommunicator(const ProcessLaunch&) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateGpuCommunicator(const HostConnector&) {
  return NoCuda();
}

absl::StatusOr<int> GpuOfProcess(const ProcessLaunch&) { return NoCuda(); }

}  // namespace burst
