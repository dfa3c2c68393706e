#include "burst/comm/launch/process_launch.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/launch/job_token.h"
#include "burst/comm/tcp/socket.h"
#include "burst/device/device.h"

namespace burst {
namespace {

// Ports that are derived from a job. They are below the ports that the system hands out by itself.
constexpr int kFirstPort = 16384, kNumPorts = 16000;

class Environment {
 public:
  explicit Environment(const std::function<const char*(const char*)>& variable)
      : variable_(variable) {}

  // Returns a variable, or null if it is not set or empty.
  const char* Find(const char* name) const {
    const char* text = variable_(name);
    return text == nullptr || *text == '\0' ? nullptr : text;
  }
  std::string Text(const char* name) const {
    const char* text = Find(name);
    return text == nullptr ? "" : text;
  }

  absl::StatusOr<int> Number(const char* name, int least, int most) const {
    const char* text = Find(name);
    if (text == nullptr) return absl::InvalidArgumentError(absl::StrCat(name, " is not set"));
    int value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, "=", text, " in the environment: expected a number from ", least, " to ", most));
    }
    return value;
  }

  // Fills in the numbers of ranks, which every launcher gives under its own names.
  absl::Status Ranks(const char* rank, const char* size, const char* local_rank,
                     ProcessLaunch* launch) const {
    const auto number = [&](const char* name, int least, int most) -> absl::StatusOr<int> {
      if (Find(name) != nullptr) return Number(name, least, most);
      return absl::InvalidArgumentError(absl::StrCat(name, " is not set, though ", launch->launcher,
                                                     " sets it with the variable ",
                                                     name == rank ? size : rank, " that is"));
    };
    BURST_ASSIGN_OR_RETURN(launch->world_size, number(size, 1, kMaxRanks));
    BURST_ASSIGN_OR_RETURN(launch->rank, number(rank, 0, launch->world_size - 1));
    BURST_ASSIGN_OR_RETURN(launch->local_rank, number(local_rank, 0, launch->world_size - 1));
    return absl::OkStatus();
  }

  // Chooses where the ranks meet, unless MASTER_ADDR and MASTER_PORT say otherwise.
  absl::Status MeetingPlace(const std::string& address, ProcessLaunch* launch) const {
    const char* master = Find("MASTER_ADDR");
    launch->address = master != nullptr ? master : address;
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (unsigned char c : launch->job) hash = (hash ^ c) * 0x100000001b3;
    launch->port = kFirstPort + static_cast<int>((hash >> 20) % kNumPorts);
    if (Find("MASTER_PORT") == nullptr) return absl::OkStatus();
    BURST_ASSIGN_OR_RETURN(launch->port, Number("MASTER_PORT", 1, 65535));
    return absl::OkStatus();
  }

 private:
  const std::function<const char*(const char*)>& variable_;
};

absl::StatusOr<ProcessLaunch> FromTorchrun(const Environment& environment) {
  ProcessLaunch launch;
  launch.launcher = "torchrun";
  BURST_RETURN_IF_ERROR(environment.Ranks("RANK", "WORLD_SIZE", "LOCAL_RANK", &launch));
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (environment.Find(name) == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is not set, though torchrun sets it with RANK, which is"));
    }
  }
  launch.job = absl::StrCat("torchrun ", environment.Text("TORCHELASTIC_RUN_ID"), " ",
                            environment.Text("TORCHELASTIC_RESTART_COUNT"));
  BURST_RETURN_IF_ERROR(environment.MeetingPlace("", &launch));
  // With an agent store, torchrun itself uses MASTER_PORT.
  if (environment.Text("TORCHELASTIC_USE_AGENT_STORE") == "True" && launch.port < 65535) {
    ++launch.port;
  }
  if (environment.Find("LOCAL_WORLD_SIZE") != nullptr) {
    BURST_ASSIGN_OR_RETURN(launch.local_size,
                           environment.Number("LOCAL_WORLD_SIZE", 1, launch.world_size));
  }
  // If mpirun starts processes with torchrun's variables, both must mean the same.
  for (const auto& [name, value] : {std::pair{"OMPI_COMM_WORLD_RANK", launch.rank},
                                    std::pair{"OMPI_COMM_WORLD_SIZE", launch.world_size}}) {
    const char* text = environment.Find(name);
    if (text == nullptr || text == absl::StrCat(value)) continue;
    const char* ours = name[16] == 'R' ? "RANK" : "WORLD_SIZE";
    return absl::InvalidArgumentError(absl::StrCat(ours, "=", value, " in the environment, but ",
                                                   name, "=", text, ": unset one of them"));
  }
  return launch;
}

absl::StatusOr<ProcessLaunch> FromMpirun(const Environment& environment) {
  ProcessLaunch launch;
  launch.launcher = "mpirun";
  BURST_RETURN_IF_ERROR(environment.Ranks("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_LOCAL_RANK", &launch));
  BURST_ASSIGN_OR_RETURN(launch.local_size,
                         environment.Number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, launch.world_size));
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (launch.job.empty()) launch.job = environment.Text(name);
  }
  launch.job = absl::StrCat("mpirun ", launch.job);
  if (launch.local_size < launch.world_size && environment.Find("MASTER_ADDR") == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("MASTER_ADDR is not set: mpirun started ", launch.world_size,
                     " processes on more than one host, and they must know rank 0's (mpirun -x "
                     "MASTER_ADDR=...)"));
  }
  BURST_RETURN_IF_ERROR(environment.MeetingPlace("127.0.0.1", &launch));
  return launch;
}

absl::StatusOr<ProcessLaunch> FromSlurm(const Environment& environment) {
  ProcessLaunch launch;
  launch.launcher = "srun";
  const auto either = [&](const char* first, const char* second) {
    return environment.Find(first) != nullptr ? first : second;
  };
  BURST_RETURN_IF_ERROR(environment.Ranks(
      "SLURM_PROCID", either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID", &launch));
  launch.job = absl::StrCat("srun ", environment.Text("SLURM_JOB_ID"), ".",
                            environment.Text("SLURM_STEP_ID"));
  int nodes = 0;
  const char* nodes_name = either("SLURM_STEP_NUM_NODES", "SLURM_NNODES");
  if (environment.Find(nodes_name) != nullptr) {
    BURST_ASSIGN_OR_RETURN(nodes, environment.Number(nodes_name, 1, launch.world_size));
  }
  std::string address = "127.0.0.1";
  launch.several_hosts = nodes > 1;
  if (nodes == 1) {
    launch.local_size = launch.world_size;
  } else {
    address = FirstHost(environment.Text(either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")));
    if (address.empty() && environment.Find("MASTER_ADDR") == nullptr) {
      return absl::InvalidArgumentError(
          "neither SLURM_JOB_NODELIST nor MASTER_ADDR is set: the processes of srun must know the "
          "host of rank 0");
    }
  }
  BURST_RETURN_IF_ERROR(environment.MeetingPlace(address, &launch));
  return launch;
}

// Checks whether there are several hosts, and that the address serves them.
absl::Status CheckHosts(ProcessLaunch* launch) {
  const bool loopback = IsLoopbackAddress(launch->address);
  if (launch->local_size > 0) {
    launch->several_hosts = launch->local_size < launch->world_size;
  } else if (!loopback && launch->world_size > 1) {
    launch->several_hosts = true;
  }
  if (!launch->several_hosts) launch->address = "127.0.0.1";
  if (!launch->several_hosts) return absl::OkStatus();
  if (launch->port > 65536 - kPortsOfRank0) {
    return absl::InvalidArgumentError(
        absl::StrCat("MASTER_PORT=", launch->port, ": must be at most ", 65536 - kPortsOfRank0,
                     ", since rank 0 listens on one of ", kPortsOfRank0, " ports from there on"));
  }
  if (!loopback) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("MASTER_ADDR=", launch->address, " is every host itself, but ", launch->launcher,
                   " started ", launch->world_size,
                   " processes on more than one: give the name or address of rank 0's host"));
}

}  // namespace

absl::StatusOr<std::optional<ProcessLaunch>> DetectProcessLaunch(
    const std::function<const char*(const char*)>& variable) {
  const Environment environment(variable);
  const auto any = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (environment.Find(name) != nullptr) return true;
    }
    return false;
  };
  absl::StatusOr<ProcessLaunch> launch;
  if (any({"RANK", "WORLD_SIZE", "LOCAL_RANK"})) {
    launch = FromTorchrun(environment);
  } else if (any({"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"})) {
    launch = FromMpirun(environment);
  } else if (any({"SLURM_STEP_ID"}) && any({"SLURM_PROCID"})) {
    // A batch script also has SLURM_PROCID. A program that it starts without srun is one process.
    launch = FromSlurm(environment);
  } else {
    return std::optional<ProcessLaunch>();
  }
  if (!launch.ok()) return launch.status();
  if (launch->local_size > 0 && launch->local_rank >= launch->local_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the local rank that ", launch->launcher, " gave this process, ", launch->local_rank,
        ", is not below the number of processes on this host, ", launch->local_size));
  }
  BURST_RETURN_IF_ERROR(CheckHosts(&*launch));
  return std::optional<ProcessLaunch>(*std::move(launch));
}

int ProcessRank() {
  const auto found = DetectProcessLaunch(std::getenv);
  return found.ok() && found->has_value() ? (*found)->rank : 0;
}

Launch DetectLaunch() {
  Launch launch;
  launch.cores = NumCores();
  launch.gpus = CudaDeviceCount();
  const auto found = DetectProcessLaunch(std::getenv);
  launch.error = found.status();
  int processes_here = 1;
  if (found.ok() && found->has_value()) {
    launch.processes = (*found)->world_size;
    launch.launcher = (*found)->launcher;
    launch.token_error = FindJobToken(**found, std::getenv).status();
    processes_here = std::max(1, (*found)->local_size);
    const bool in_order = (*found)->local_rank == (*found)->rank % processes_here;
    if (in_order && launch.processes % processes_here == 0) {
      launch.ranks_per_node = (*found)->local_size;
    }
  }
  // Processes that are bound to cores see only those cores. Others share the machine's cores.
  if (launch.cores == sysconf(_SC_NPROCESSORS_ONLN)) launch.cores /= processes_here;
  launch.cores = std::max(1, launch.cores);
  return launch;
}

std::string FirstHost(const std::string& node_list) {
  std::string host;
  for (size_t begin = 0;;) {
    const size_t end = node_list.find_first_of(",[", begin);
    host += node_list.substr(begin, end - begin);
    if (end == std::string::npos || node_list[end] == ',') return host;
    const size_t number = end + 1, after = node_list.find_first_of(",-]", number);
    if (after == std::string::npos) return "";
    host += node_list.substr(number, after - number);
    // The text after the brackets belongs to each of their hosts: "rack[1-2]gpu".
    const size_t close = node_list.find(']', after);
    if (close == std::string::npos) return "";
    begin = close + 1;
  }
}

}  // namespace burst
