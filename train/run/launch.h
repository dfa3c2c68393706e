// Starts the ranks of a training run: as threads of this process, or as the processes of a
// launcher.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "train/config/config.h"
#include "train/run/setup.h"

namespace burst {

// Runs body(communicator) on the ranks of `config` as threads of this process, and returns the
// first error. Each rank has its pool of threads and, on cuda, its GPU.
absl::Status RunRanksInProcess(const ResolvedConfig& config,
                               const std::function<absl::Status(Communicator&)>& body);

// A check of a prepared run before its first step, on one rank. An error ends the run. The
// planner's check refuses a step that does not fit into memory (train/plan/check_run.h).
using RunCheck = std::function<absl::Status(TrainingSetup*)>;

// Trains: prepares, checks, starts the ranks, and returns the first error. With --comm=tcp, mpi
// and nccl every process calls it. If several fail together, one returns the error and the others
// Cancelled, so it is printed once. A process that fails alone ends the others with its message.
absl::Status RunTraining(const ResolvedConfig& config, const RunCheck& check);

}  // namespace burst
