#include "burst/comm/gpu/gpu_communicator.h"

#include <exception>
#include <memory>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/host_memory.h"
#include "burst/base/status.h"
#include "burst/comm/gpu/gpu_rank.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "burst/device/progress.h"

namespace burst {
namespace {

absl::Status RunRank(Communicator* host, GpuWorld* world,
                     const std::function<absl::Status(Communicator&)>& body) {
  BURST_ASSIGN_OR_RETURN(const auto communicator, GpuCommunicator::Create(host, world));
  absl::Status status;
  try {
    status = body(*communicator);
  } catch (const std::exception& exception) {
    status =
        absl::InternalError(absl::StrCat("rank ", host->rank(), " threw: ", Describe(exception)));
  }
  // This comes before the destructor, which would wait for messages that may never come.
  if (!status.ok()) host->Abort(status);
  return status;
}

}  // namespace

absl::Status RunCudaRanks(int world_size, const std::function<absl::Status(Communicator&)>& body) {
  const int gpus = CudaDeviceCount();
  if (world_size > gpus) {
    return absl::InvalidArgumentError(
        absl::StrCat(world_size, " ranks need one GPU each, and this machine has ", gpus));
  }
  GpuWorld world(/*in_threads=*/true);
  return RunRanks(
      world_size,
      [&](Communicator& host) {
        const ScopedCudaDevice device(host.rank(), host.rank());
        const auto marks = MarkDeviceProgress(DeviceType::kCuda);
        return RunRank(&host, &world, body);
      },
      [&](const absl::Status& failure) { world.watchdog.Fail(failure); });
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateGpuCommunicator(const ProcessLaunch& launch) {
  BURST_ASSIGN_OR_RETURN(
      std::unique_ptr<Communicator> communicator,
      GpuCommunicator::Create(
          [&launch](TcpOptions options) -> absl::StatusOr<std::unique_ptr<Communicator>> {
            BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host,
                                   TcpCommunicator::Create(launch, options));
            return host;
          },
          /*ends_process=*/true));
  return communicator;
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateGpuCommunicator(const HostConnector& connect) {
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                         GpuCommunicator::Create(connect, /*ends_process=*/false));
  return communicator;
}

absl::StatusOr<int> GpuOfProcess(const ProcessLaunch& launch) {
  const int gpus = CudaDeviceCount();
  if (launch.local_rank < gpus) return launch.local_rank;
  if (gpus == 1) return 0;
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", launch.rank, " is number ", launch.local_rank,
                   " on its host and needs a GPU of its own, but sees ", gpus));
}

}  // namespace burst
