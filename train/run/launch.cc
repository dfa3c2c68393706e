#include "train/run/launch.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "burst/base/host_memory.h"
#include "burst/base/parallel.h"
#include "burst/base/print_error.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/base/watchdog.h"
#include "burst/cli/process.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/mpi/mpi_communicator.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "burst/device/progress.h"
#include "model/ops/cuda/matmul.h"
#include "train/report/run_folder.h"
#include "train/run/agreement.h"
#include "train/run/setup.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

constexpr int64_t kForEver = 1'000'000'000;  // seconds

absl::Status TrainRank(const TrainingSetup& setup, Communicator* comm) {
  try {
    BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                           Trainer::Create(setup, comm, /*verbose=*/true));
    return trainer->Train();
  } catch (const std::exception& exception) {  // becomes an error that the other ranks get, too
    return absl::InternalError(Describe(exception));
  }
}

// Agrees on the nodes. Hosts with different numbers of processes see different nodes, and make no
// double ring.
absl::Status AgreeOnNodes(Communicator* comm, ResolvedConfig* config) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm->AllGather(config->ranks_per_node));
  const bool agreed = std::all_of(all.begin(), all.end(), [&](double n) { return n == all[0]; });
  if (!agreed) config->ranks_per_node = 0;
  return absl::OkStatus();
}

// Ends this process after another rank was lost. This rank has not noticed, because it computes or
// writes a file.
void EndProcess(const absl::Status& failure) {
  PrintError(failure);
  std::_Exit(kExitFailure);
}

// The processes that prepare a run together: those of a job, or this one alone.
struct Processes {
  Communicator* comm = nullptr;  // null if this process is alone and its ranks are threads
  std::optional<ScopedRankProgress> progress = {};

  bool IsFirst() const { return comm == nullptr || comm->rank() == 0; }
  // Returns on all processes the error of the first process that has one.
  absl::Status Agree(const absl::Status& status) const {
    return comm == nullptr ? status : AgreeOn(status, comm);
  }
  void WatchThisRank() {
    if (comm != nullptr && current_progress == nullptr) progress.emplace(comm->rank());
  }
};

// Waits until the resumed run has ended elsewhere. Its checkpoint is read after that.
absl::Status LockResumed(const ResolvedConfig& config, std::optional<RunLock>* lock) {
  if (!config.resume) return absl::OkStatus();
  BURST_ASSIGN_OR_RETURN(*lock, LockRunFolder(config.out, /*wait=*/true));
  return absl::OkStatus();
}

absl::StatusOr<TrainingSetup> PrepareUnwatched(const ResolvedConfig& config) {
  const ScopedUnwatched unwatched;
  return PrepareTraining(config);
}

// Completes a run that has made its steps, if a killed process left it incomplete. One rank calls
// it.
absl::Status CloseFinished(TrainingSetup* setup) {
  const ResolvedConfig& config = setup->config;
  BURST_ASSIGN_OR_RETURN(const bool repaired,
                         RunFolder::Repair(config, *setup->resumed, *setup->lock));
  std::printf("the run in %s is complete: it has made its %lld steps%s\n", config.out.c_str(),
              static_cast<long long>(config.steps),
              repaired ? "; what its last save had not come to is done" : "");
  return absl::OkStatus();
}

// Does everything before the first step, in one order for all launchers: the data, the run's lock,
// its checkpoint, the check. A run that has made its steps is closed; setup.finished says so.
absl::StatusOr<TrainingSetup> PrepareRun(const ResolvedConfig& config, const RunCheck& check,
                                         Processes* processes) {
  Communicator* const comm = processes->comm;
  if (comm != nullptr) BURST_RETURN_IF_ERROR(AgreeOnOptions(config, comm));
  absl::StatusOr<TrainingSetup> setup = PrepareUnwatched(config);
  // Over MPI, nothing else distinguishes a rank that has stopped from one that reads for a long
  // time.
  if (config.comm == CommKind::kMpi) processes->WatchThisRank();
  BURST_RETURN_IF_ERROR(processes->Agree(setup.status()));
  if (comm != nullptr) BURST_RETURN_IF_ERROR(AgreeOnSetup(*setup, comm));
  absl::Status status;
  if (processes->IsFirst()) status = LockResumed(setup->config, &setup->lock);
  BURST_RETURN_IF_ERROR(processes->Agree(status));
  BURST_RETURN_IF_ERROR(processes->Agree(FindResumed(&*setup)));
  if (comm != nullptr) BURST_RETURN_IF_ERROR(AgreeOnCheckpoint(*setup, comm));
  if (setup->finished) {
    if (processes->IsFirst()) status = CloseFinished(&*setup);
    BURST_RETURN_IF_ERROR(processes->Agree(status));
    return setup;
  }
  // The watch begins only now, because others may have waited while this one loaded data.
  processes->WatchThisRank();
  if (comm != nullptr) BURST_RETURN_IF_ERROR(AgreeOnNodes(comm, &setup->config));
  if (processes->IsFirst()) {
    // Empty where this process is a rank and has chosen its GPU.
    std::optional<ScopedCudaDevice> first;
    if (comm == nullptr && config.device == DeviceType::kCuda) first.emplace(0);
    status = check(&*setup);
  }
  BURST_RETURN_IF_ERROR(processes->Agree(status));
  return setup;
}

// Trains with threads of this process as ranks.
absl::Status TrainThreads(const ResolvedConfig& config, const RunCheck& check) {
  Processes alone;
  BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareRun(config, check, &alone));
  if (setup.finished) return absl::OkStatus();
  return RunRanksInProcess(config, [&](Communicator& comm) { return TrainRank(setup, &comm); });
}

// Trains with this process as a rank. The processes are connected before they read data, because
// reading may take some longer than others. So the others can name a process that is lost
// meanwhile.
absl::Status TrainProcess(const ResolvedConfig& config, const RunCheck& check, Communicator* comm) {
  Processes processes{comm};
  BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareRun(config, check, &processes));
  if (setup.finished) return absl::OkStatus();
  const ScopedThreadPool pool(setup.config.threads);
  const StopsBetweenSteps asks;
  const absl::Status status = TrainRank(setup, comm);
  if (!status.ok()) {
    comm->Abort(status);
    return status;
  }
  // Rank 0 may still write the last checkpoint. Launchers kill it when another process ends with
  // the code of a signal.
  const ScopedPhase phase("exit");
  return AgreeOn(absl::OkStatus(), comm);
}

absl::Status TrainOverMpi(const ResolvedConfig& config, const RunCheck& check) {
  BURST_ASSIGN_OR_RETURN(const auto mpi, CreateMpiCommunicator());
  if (mpi->world_size() != config.ranks) {
    return InvalidOption("comm", "mpi must have a process for each of the ", config.ranks,
                         " ranks; got ", mpi->world_size(), "; start them by mpirun");
  }
  return TrainProcess(config, check, mpi.get());
}

absl::Status TrainOverTcp(const ResolvedConfig& config, const RunCheck& check,
                          const ProcessLaunch& launch) {
  TcpOptions options;
  options.grace = std::chrono::seconds(10);
  options.on_failure = EndProcess;
  BURST_ASSIGN_OR_RETURN(const auto comm, TcpCommunicator::Create(launch, options));
  return TrainProcess(config, check, comm.get());
}

absl::Status TrainOverGpus(const ResolvedConfig& config, const RunCheck& check,
                           const ProcessLaunch& launch) {
  BURST_ASSIGN_OR_RETURN(const int gpu, GpuOfProcess(launch));
  const ScopedCudaDevice device(gpu, launch.rank);
  const ScopedRankProgress progress(launch.rank);
  const auto marks = MarkDeviceProgress(DeviceType::kCuda);
  BURST_ASSIGN_OR_RETURN(const auto comm, CreateGpuCommunicator(launch));
  return TrainProcess(config, check, comm.get());
}

}  // namespace

absl::Status RunRanksInProcess(const ResolvedConfig& config,
                               const std::function<absl::Status(Communicator&)>& body) {
  const auto with_pool = [&](Communicator& comm) {
    const ScopedThreadPool pool(config.threads);
    return body(comm);
  };
  if (config.device == DeviceType::kCuda) return RunCudaRanks(config.ranks, with_pool);
  return RunRanks(config.ranks, with_pool);
}

absl::Status RunTraining(const ResolvedConfig& config, const RunCheck& check) {
  std::optional<Watchdog> watchdog;
  const std::chrono::seconds patience(std::min(config.patience, kForEver));
  if (config.patience > 0) watchdog.emplace(patience);
  if (config.tf32) cuda::AllowTf32(true);
  if (config.comm == CommKind::kThreads) return TrainThreads(config, check);
  if (config.comm == CommKind::kMpi) return TrainOverMpi(config, check);
  BURST_ASSIGN_OR_RETURN(auto launch, DetectProcessLaunch(std::getenv));
  if (config.patience > 0) {
    launch->patience = std::min<std::chrono::milliseconds>(launch->patience, patience);
  }
  return config.comm == CommKind::kTcp ? TrainOverTcp(config, check, *launch)
                                       : TrainOverGpus(config, check, *launch);
}

}  // namespace burst
