#include "train/launch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/nccl_communicator.h"
#include "burst/comm/thread_communicator.h"
#include "burst/device/device.h"
#include "model/ops/cuda/matmul.h"
#include "train/trainer.h"
#include "train/training_setup.h"

namespace burst {
namespace {

// A number that Open MPI's mpirun left in the environment.
int FromEnvironment(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  int value = 0;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

absl::Status TrainRank(const TrainingSetup& setup, Communicator* comm) {
  BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::Create(setup, comm, /*verbose=*/true));
  return trainer->Train();
}

}  // namespace

Launch DetectLaunch(const Communicator* mpi) {
  Launch launch;
  launch.processes =
      mpi != nullptr ? mpi->world_size() : FromEnvironment("OMPI_COMM_WORLD_SIZE", 1);
  launch.cores = NumCores();
  launch.gpus = CudaDeviceCount();
  // Processes that mpirun bound to cores see only those; others share the machine's.
  if (mpi != nullptr && launch.cores == sysconf(_SC_NPROCESSORS_ONLN)) {
    launch.cores /= FromEnvironment("OMPI_COMM_WORLD_LOCAL_SIZE", 1);
  }
  launch.cores = std::max(1, launch.cores);
  return launch;
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
  if (mpi == nullptr) {
    BURST_RETURN_IF_ERROR(setup.status());
    return RunRanksInProcess(config, [&](Communicator& comm) { return TrainRank(*setup, &comm); });
  }
  BURST_RETURN_IF_ERROR(AgreeOn(setup.status(), mpi));
  const ScopedThreadPool pool(config.threads);
  const absl::Status status = TrainRank(*setup, mpi);
  if (!status.ok()) mpi->Abort(status);
  return status;
}

absl::Status AgreeOn(const absl::Status& status, Communicator* mpi) {
  if (mpi == nullptr) return status;
  BURST_ASSIGN_OR_RETURN(const std::vector<double> failed, mpi->AllGather(status.ok() ? 0 : 1));
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (first == failed.end()) return absl::OkStatus();
  if (first - failed.begin() == mpi->rank()) return status;
  return absl::CancelledError(absl::StrCat("rank ", first - failed.begin(), " failed"));
}

}  // namespace burst
