// Finds out how this process was started: alone or by a launcher. It also gives the rank among the
// others, where they meet, and the devices that each may use.
//
// torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, all of them.
// mpirun (Open MPI): OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE; on more than one
//   node also MASTER_ADDR, rank 0's (mpirun -x MASTER_ADDR=...).
// srun (Slurm): SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID and the list of nodes, inside a step. The
// first launcher found counts, because torchrun may run under the others. MASTER_ADDR and
// MASTER_PORT, if set, are where rank 0 listens, with all three; a job of one host meets in a
// folder (burst/comm/tcp/socket_folder.h), whatever MASTER_ADDR says. At most kMaxRanks processes.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace burst {

// The most ranks of a job. Every two processes are connected.
inline constexpr int kMaxRanks = 1024;

// The number of ports that rank 0 of a job of several hosts tries to listen on, from
// ProcessLaunch::port on.
inline constexpr int kPortsOfRank0 = 16;

struct ProcessLaunch {
  std::string launcher;  // "torchrun", "mpirun", "srun"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  // among the processes of this host
  int local_size = 0;  // 0: unknown
  // Whether the processes are on more than one host. Where the launcher does not say how many
  // processes this host has, a MASTER_ADDR that is not loopback means that they may be.
  bool several_hosts = false;
  std::string address;  // the address of rank 0's host
  int port = 0;         // where ranks look for rank 0 first; see rendezvous.h
  std::string job;      // tells apart jobs that look for the same port
  // How long the processes wait for one another to come.
  std::chrono::milliseconds patience = std::chrono::minutes(3);
};

// The launch that the environment describes; none if no launcher set its variables. `variable` is
// getenv, or replaces it in tests. InvalidArgument, naming the variable, if variables are missing,
// malformed or contradictory.
absl::StatusOr<std::optional<ProcessLaunch>> DetectProcessLaunch(
    const std::function<const char*(const char*)>& variable);

// This process's rank among those of its launcher; 0 without one.
int ProcessRank();

// The processes that were started and what each of them may use. A program chooses its number of
// ranks, their transport and their devices from this.
struct Launch {
  int processes = 1;
  int cores = 1;  // that this process may use
  int gpus = 0;   // that this process sees
  std::string launcher = "mpirun";
  absl::Status error = absl::OkStatus();  // in the launcher's environment variables
  // In the variables of the job's token (job_token.h), which processes need over sockets and NCCL.
  absl::Status token_error = absl::OkStatus();
  // Processes of each host, if every host has as many and their ranks are consecutive; 0: unknown.
  int ranks_per_node = 0;
};

Launch DetectLaunch();

// The first host of a Slurm list such as "gpu[003-004,7],login": "gpu003".
std::string FirstHost(const std::string& node_list);

}  // namespace burst
