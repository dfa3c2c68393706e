#include "burst/comm/launched_ranks.h"

#include <cstdlib>

#include "burst/base/status.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/tcp/tcp_communicator.h"

namespace burst {

absl::StatusOr<std::unique_ptr<LaunchedRanks>> LaunchedRanks::Connect(DeviceType device) {
  BURST_ASSIGN_OR_RETURN(const auto launch, DetectProcessLaunch(std::getenv));
  if (!launch.has_value() || launch->world_size == 1) return nullptr;
  auto ranks = std::make_unique<LaunchedRanks>();
  if (device == DeviceType::kCuda) {
    BURST_ASSIGN_OR_RETURN(const int gpu, GpuOfProcess(*launch));
    ranks->gpu_.emplace(gpu, launch->rank);
    BURST_ASSIGN_OR_RETURN(ranks->comm_, CreateGpuCommunicator(*launch));
  } else {
    BURST_ASSIGN_OR_RETURN(ranks->comm_, TcpCommunicator::Create(*launch, TcpOptions()));
  }
  return ranks;
}

}  // namespace burst
