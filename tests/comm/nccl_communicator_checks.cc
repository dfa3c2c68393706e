// Ranks as processes that own one GPU each: started by nccl_processes_test.sh under a launcher.
//
// nccl_communicator_checks [library | wait | abort] [GoogleTest flags]: "library" tests the ranks
// of a library, which also have mail. "wait" runs all-reduces on the GPU until another rank is
// lost; with "abort", rank 1 gives up meanwhile.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"
#include "tests/comm/communicator_checks.h"
#include "tests/comm/process_ranks.h"

namespace burst {
namespace {

class NcclRanks : public testing::TestWithParam<CommunicatorCheck> {};
INSTANTIATE_TEST_SUITE_P(All, NcclRanks, testing::ValuesIn(CommunicatorChecks()),
                         [](const auto& info) { return std::string(info.param.name); });
TEST_P(NcclRanks, InHostMemory) { RunOnAllRanks(GetParam(), {}); }
TEST_P(NcclRanks, InGpuMemory) {
  RunOnAllRanks(GetParam(), {DeviceType::kCuda, /*fixed_order=*/world->world_size() == 1,
                             /*posts_in_turn=*/true});
}

absl::Status SumForEver(bool abort) {
  const Tensor tensor = Tensor::Zeros({1 << 20}, DType::kFloat32, DeviceType::kCuda);
  for (int step = 0;; ++step) {
    BURST_RETURN_IF_ERROR(world->AllReduceSum(tensor));
    SynchronizeDevice(DeviceType::kCuda);
    if (step == 0) {
      std::printf("rank %d is process %d\n", world->rank(), static_cast<int>(getpid()));
      std::fflush(stdout);
    }
    if (abort && step == 100 && world->rank() == 1) return absl::InternalError("disk full");
  }
}

absl::StatusOr<std::unique_ptr<Communicator>> InLibrary(const ProcessLaunch& launch) {
  return CreateGpuCommunicator(
      [&](TcpOptions options) -> absl::StatusOr<std::unique_ptr<Communicator>> {
        options.ends_process = false;
        BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host,
                               TcpCommunicator::Create(launch, options));
        return host;
      });
}

absl::Status Start(bool in_library, std::unique_ptr<ScopedCudaDevice>* device,
                   std::unique_ptr<Communicator>* communicator) {
  BURST_ASSIGN_OR_RETURN(const std::optional<ProcessLaunch> launch,
                         DetectProcessLaunch(std::getenv));
  if (!launch.has_value()) return absl::FailedPreconditionError("started by no launcher");
  BURST_ASSIGN_OR_RETURN(const int gpu, GpuOfProcess(*launch));
  *device = std::make_unique<ScopedCudaDevice>(gpu, launch->rank);
  BURST_ASSIGN_OR_RETURN(*communicator,
                         in_library ? InLibrary(*launch) : CreateGpuCommunicator(*launch));
  if (launch->rank == 0) std::printf("%s\n", launch->launcher.c_str());
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::unique_ptr<ScopedCudaDevice> device;
  std::unique_ptr<Communicator> communicator;
  const std::string mode = argc > 1 ? argv[1] : "";
  const absl::Status started = Start(mode == "library", &device, &communicator);
  if (!started.ok()) {
    std::fprintf(stderr, "error: %s\n", std::string(started.message()).c_str());
    return 2;
  }
  world = communicator.get();
  if (mode.empty() || mode == "library") return RunAllTestsOnAllRanks();
  const absl::Status status = SumForEver(mode == "abort");
  world->Abort(status);
  return 3;
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
