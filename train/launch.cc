#include "train/launch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/exit_code.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/nccl/nccl_communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "model/ops/cuda/matmul.h"
#include "train/setup.h"
#include "train/trainer.h"

namespace burst {
namespace {

absl::Status TrainRank(const TrainingSetup& setup, Communicator* comm) {
  BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::Create(setup, comm, /*verbose=*/true));
  return trainer->Train();
}

// Hosts with different numbers of processes see different nodes, and make no double ring.
absl::Status AgreeOnNodes(Communicator* comm, ResolvedConfig* config) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm->AllGather(config->ranks_per_node));
  const bool agreed = std::all_of(all.begin(), all.end(), [&](double n) { return n == all[0]; });
  if (!agreed) config->ranks_per_node = 0;
  return absl::OkStatus();
}

// This process is a rank.
absl::Status TrainProcess(absl::StatusOr<TrainingSetup> setup, Communicator* comm) {
  BURST_RETURN_IF_ERROR(AgreeOn(setup.status(), comm));
  BURST_RETURN_IF_ERROR(AgreeOnNodes(comm, &setup->config));
  const ScopedThreadPool pool(setup->config.threads);
  const absl::Status status = TrainRank(*setup, comm);
  if (!status.ok()) comm->Abort(status);
  return status;
}

}  // namespace

Launch DetectLaunch(const Communicator* mpi) {
  Launch launch;
  launch.cores = NumCores();
  launch.gpus = CudaDeviceCount();
  const auto found = DetectProcessLaunch(std::getenv);
  launch.error = found.status();
  int processes_here = 1;
  if (found.ok() && found->has_value()) {
    launch.processes = (*found)->world_size;
    launch.launcher = (*found)->launcher;
    processes_here = std::max(1, (*found)->local_size);
    const bool in_order = (*found)->local_rank == (*found)->rank % processes_here;
    if (in_order && launch.processes % processes_here == 0) {
      launch.ranks_per_node = (*found)->local_size;
    }
  }
  if (mpi != nullptr) launch.processes = mpi->world_size();
  // Processes that were bound to cores see only those; others share the machine's.
  if (launch.cores == sysconf(_SC_NPROCESSORS_ONLN)) launch.cores /= processes_here;
  launch.cores = std::max(1, launch.cores);
  return launch;
}

int ProcessRank() {
  const auto found = DetectProcessLaunch(std::getenv);
  return found.ok() && found->has_value() ? (*found)->rank : 0;
}

// A launcher ends all processes when one fails: as soon as that one has spoken.
void LeaveTimeToSpeak() {
  constexpr int kSeconds = 10;
  sleep(kSeconds);
}

int RefuseUsage(const absl::Status& mistake) {
  if (ProcessRank() != 0) LeaveTimeToSpeak();  // one that is alone with its mistake says it then
  return ExitCode(mistake, kExitBadUsage);
}

absl::Status RunRanksInProcess(const ResolvedConfig& config,
                               const std::function<absl::Status(Communicator&)>& body) {
  const auto with_pool = [&](Communicator& comm) {
    const ScopedThreadPool pool(config.threads);
    return body(comm);
  };
  if (config.device == DeviceType::kCuda) return RunCudaRanks(config.ranks, with_pool);
  return RunRanks(config.ranks, with_pool);
}

absl::Status RunTraining(const ResolvedConfig& config, Communicator* mpi) {
  if (config.tf32) BURST_CUDA_CALL(cuda::AllowTf32(true));
  absl::StatusOr<TrainingSetup> setup = PrepareTraining(config);
  if (config.comm == CommKind::kThreads) {
    BURST_RETURN_IF_ERROR(setup.status());
    return RunRanksInProcess(config, [&](Communicator& comm) { return TrainRank(*setup, &comm); });
  }
  if (config.comm == CommKind::kMpi) return TrainProcess(std::move(setup), mpi);

  BURST_ASSIGN_OR_RETURN(const auto launch, DetectProcessLaunch(std::getenv));
  BURST_ASSIGN_OR_RETURN(const int gpu, GpuOfProcess(*launch));
  const ScopedCudaDevice device(gpu, launch->rank);
  BURST_ASSIGN_OR_RETURN(const auto comm, CreateNcclCommunicator(*launch));
  return TrainProcess(std::move(setup), comm.get());
}

absl::Status AgreeOn(const absl::Status& status, Communicator* comm) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> failed, comm->AllGather(status.ok() ? 0 : 1));
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (first == failed.end()) return absl::OkStatus();
  if (first - failed.begin() == comm->rank()) return status;
  return absl::CancelledError(absl::StrCat("rank ", first - failed.begin(), " failed"));
}

}  // namespace burst
