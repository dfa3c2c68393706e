// How ranks start: as threads of this process, or as the processes of a launcher.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "train/config/config.h"

namespace burst {

// `mpi`: the communicator of all processes with --comm=mpi, else null.
Launch DetectLaunch(const Communicator* mpi);

// This process among those of a launcher; 0 if there is none.
int ProcessRank();

// Says what is wrong with the options and returns the exit code. Every process of a launcher finds
// the same mistake, and the first one says so.
int RefuseUsage(const absl::Status& mistake);
// For a process of which another one has an error to say.
void LeaveTimeToSpeak();

// Runs body(communicator) on the ranks of `config` as threads of this process, each with its pool
// of threads and, on cuda, its GPU; returns the first error.
absl::Status RunRanksInProcess(const ResolvedConfig& config,
                               const std::function<absl::Status(Communicator&)>& body);

// Trains: prepares, starts the ranks, and returns the first error. `mpi` as for DetectLaunch. With
// --comm=mpi and nccl every process calls it; of those that fail together, one returns the error
// and the others Cancelled, so that it is printed once. A process that fails alone takes the others
// down with its message.
absl::Status RunTraining(const ResolvedConfig& config, Communicator* mpi);

// Collective: the lowest rank that failed keeps its status, all others become Cancelled.
absl::Status AgreeOn(const absl::Status& status, Communicator* comm);

}  // namespace burst
