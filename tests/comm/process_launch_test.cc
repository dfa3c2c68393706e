#include "burst/comm/launch/process_launch.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/strings/match.h"

namespace burst {
namespace {

using Variables = std::map<std::string, std::string>;

absl::StatusOr<std::optional<ProcessLaunch>> Detect(const Variables& variables) {
  return DetectProcessLaunch([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

ProcessLaunch Found(const Variables& variables) {
  const auto launch = Detect(variables);
  EXPECT_TRUE(launch.ok() && launch->has_value()) << launch.status();
  return launch.ok() && launch->has_value() ? **launch : ProcessLaunch();
}

Variables With(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}
Variables Without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "gpu001"},
                             {"MASTER_PORT", "29500"}};
const Variables kMpirun = {{"OMPI_COMM_WORLD_RANK", "2"},
                           {"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                           {"PMIX_NAMESPACE", "2863267841"}};
const Variables kSrun = {{"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "9"},
                         {"SLURM_NTASKS", "16"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NNODES", "2"},
                         {"SLURM_JOB_NODELIST", "gpu[07-08]"}};

TEST(ProcessLaunch, NoLauncher) {
  for (const Variables& variables :
       {Variables(), Variables{{"PATH", "/bin"}, {"MASTER_PORT", "1"}}, Variables{{"RANK", ""}},
        // This is a batch script of Slurm, outside srun.
        Variables{{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}}) {
    const auto launch = Detect(variables);
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_FALSE(launch->has_value());
  }
}

TEST(ProcessLaunch, Torchrun) {
  const ProcessLaunch launch = Found(kTorchrun);
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 4);
  EXPECT_EQ(launch.address, "gpu001");
  EXPECT_EQ(launch.port, 29500);
  // torchrun itself listens on the port.
  EXPECT_EQ(Found(With(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).port, 29501);
  // The processes are started by hand, or by a launcher that sets no more variables.
  EXPECT_EQ(Found(Without(kTorchrun, "LOCAL_WORLD_SIZE")).local_size, 0);
  // Under the other launchers it is torchrun's processes that count.
  EXPECT_EQ(Found(With(kSrun, kTorchrun)).launcher, "torchrun");
}

TEST(ProcessLaunch, Mpirun) {
  const ProcessLaunch launch = Found(kMpirun);
  EXPECT_EQ(launch.launcher, "mpirun");
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 2);
  EXPECT_EQ(launch.local_size, 4);
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_GE(launch.port, 1024);
  EXPECT_LT(launch.port, 32768);
  // All ranks of a job find the same port; another job finds another port.
  EXPECT_EQ(Found(With(kMpirun, {{"OMPI_COMM_WORLD_RANK", "0"}})).port, launch.port);
  EXPECT_NE(Found(With(kMpirun, {{"PMIX_NAMESPACE", "2863267842"}})).port, launch.port);
  // These processes are on several hosts.
  const Variables hosts = With(kMpirun, {{"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                         {"MASTER_ADDR", "10.0.0.1"},
                                         {"MASTER_PORT", "4000"}});
  EXPECT_EQ(Found(hosts).address, "10.0.0.1");
  EXPECT_EQ(Found(hosts).port, 4000);
  // Within an allocation of Slurm it is mpirun's processes that count.
  EXPECT_EQ(Found(With(kSrun, kMpirun)).launcher, "mpirun");
}

TEST(ProcessLaunch, Srun) {
  const ProcessLaunch launch = Found(kSrun);
  EXPECT_EQ(launch.launcher, "srun");
  EXPECT_EQ(launch.rank, 9);
  EXPECT_EQ(launch.world_size, 16);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 0);
  EXPECT_EQ(launch.address, "gpu07");
  EXPECT_NE(Found(With(kSrun, {{"SLURM_STEP_ID", "1"}})).port, launch.port);
  EXPECT_EQ(Found(With(kSrun, {{"MASTER_ADDR", "head"}})).address, "head");

  const Variables step = With(kSrun, {{"SLURM_STEP_NUM_TASKS", "12"},
                                      {"SLURM_STEP_NUM_NODES", "1"},
                                      {"SLURM_STEP_NODELIST", "gpu08"}});
  EXPECT_EQ(Found(step).world_size, 12);
  EXPECT_EQ(Found(step).local_size, 12);
  EXPECT_EQ(Found(step).address, "127.0.0.1");
}

// Whether a job has several hosts decides what it listens on and whether it needs BURST_TOKEN.
TEST(ProcessLaunch, Hosts) {
  EXPECT_TRUE(Found(kTorchrun).several_hosts);
  EXPECT_TRUE(Found(kSrun).several_hosts);
  EXPECT_FALSE(Found(kMpirun).several_hosts);
  // One host meets on loopback, whatever its name is.
  const Variables one = With(kTorchrun, {{"LOCAL_WORLD_SIZE", "8"}, {"LOCAL_RANK", "5"}});
  EXPECT_FALSE(Found(one).several_hosts);
  EXPECT_EQ(Found(one).address, "127.0.0.1");
  // This launcher does not say how many processes are on the host.
  const Variables unknown = Without(kTorchrun, "LOCAL_WORLD_SIZE");
  EXPECT_TRUE(Found(unknown).several_hosts);
  for (const char* here : {"localhost", "127.0.0.1", "::1"}) {
    EXPECT_FALSE(Found(With(unknown, {{"MASTER_ADDR", here}})).several_hosts);
  }
}

TEST(ProcessLaunch, FirstHost) {
  EXPECT_EQ(FirstHost("gpu1"), "gpu1");
  EXPECT_EQ(FirstHost("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(FirstHost("gpu[003-004,7],login"), "gpu003");
  EXPECT_EQ(FirstHost("gpu[7]"), "gpu7");
  EXPECT_EQ(FirstHost("gpu[7,9],login"), "gpu7");
  EXPECT_EQ(FirstHost("rack[1-2]gpu,x"), "rack1gpu");
  EXPECT_EQ(FirstHost("rack[1-2]gpu[3-4]"), "rack1gpu3");
  EXPECT_EQ(FirstHost(""), "");
  EXPECT_EQ(FirstHost("gpu["), "");
}

struct BadEnvironment {
  Variables variables;
  std::string says;
};

// Each error names the wrong variable.
TEST(ProcessLaunch, Errors) {
  const BadEnvironment environments[] = {
      {Without(kTorchrun, "RANK"), "RANK is not set"},
      {Without(kTorchrun, "WORLD_SIZE"), "WORLD_SIZE is not set, though torchrun sets it with"},
      {Without(kTorchrun, "LOCAL_RANK"), "LOCAL_RANK is not set"},
      {Without(kTorchrun, "MASTER_ADDR"), "MASTER_ADDR is not set"},
      {Without(kTorchrun, "MASTER_PORT"), "MASTER_PORT is not set"},
      {With(kTorchrun, {{"MASTER_PORT", "65521"}}),
       "MASTER_PORT=65521: must be at most 65520, since rank 0 listens on one of 16 ports"},
      {With(kTorchrun, {{"RANK", "8"}}),
       "RANK=8 in the environment: expected a number from 0 to 7"},
      {With(kTorchrun, {{"RANK", "-1"}}), "RANK=-1"},
      {With(kTorchrun, {{"WORLD_SIZE", "many"}}), "WORLD_SIZE=many"},
      {With(kTorchrun, {{"WORLD_SIZE", "0"}}), "WORLD_SIZE=0"},
      {With(kTorchrun, {{"WORLD_SIZE", "1000000"}}),
       "WORLD_SIZE=1000000 in the environment: expected a number from 1 to 1024"},
      {With(kTorchrun, {{"WORLD_SIZE", "99999999999999999999"}}), "WORLD_SIZE=9999"},
      {With(kMpirun, {{"OMPI_COMM_WORLD_SIZE", "1048576"}}), "OMPI_COMM_WORLD_SIZE=1048576"},
      {With(kSrun, {{"SLURM_NTASKS", "65536"}}), "SLURM_NTASKS=65536"},
      {With(kTorchrun, {{"MASTER_ADDR", "localhost"}}),
       "MASTER_ADDR=localhost is every host itself, but torchrun started 8 processes"},
      {With(kSrun, {{"MASTER_ADDR", "127.0.0.1"}}), "MASTER_ADDR=127.0.0.1 is every host itself"},
      {With(kTorchrun, {{"MASTER_PORT", "70000"}}), "MASTER_PORT=70000"},
      {With(kTorchrun, {{"LOCAL_RANK", "4"}}), "the local rank that torchrun gave this process, 4"},
      {With(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), "LOCAL_WORLD_SIZE=9"},
      {With(kTorchrun, {{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "8"}}),
       "RANK=5 in the environment, but OMPI_COMM_WORLD_RANK=2"},
      {With(kTorchrun, {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "16"}}),
       "WORLD_SIZE=8 in the environment, but OMPI_COMM_WORLD_SIZE=16"},
      {Without(kMpirun, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set"},
      {Without(kMpirun, "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_LOCAL_RANK is not set"},
      {Without(kMpirun, "OMPI_COMM_WORLD_LOCAL_SIZE"), "OMPI_COMM_WORLD_LOCAL_SIZE is not set"},
      {With(kMpirun, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}}),
       "MASTER_ADDR is not set: mpirun started 4 processes on more than one host"},
      {Without(kSrun, "SLURM_NTASKS"), "SLURM_NTASKS is not set"},
      {Without(kSrun, "SLURM_LOCALID"), "SLURM_LOCALID is not set"},
      {Without(kSrun, "SLURM_JOB_NODELIST"), "neither SLURM_JOB_NODELIST nor MASTER_ADDR is set"},
      {With(kSrun, {{"SLURM_PROCID", "16"}}), "SLURM_PROCID=16"},
  };
  for (const BadEnvironment& bad : environments) {
    const auto launch = Detect(bad.variables);
    EXPECT_EQ(launch.status().code(), absl::StatusCode::kInvalidArgument) << bad.says;
    EXPECT_TRUE(absl::StrContains(launch.status().message(), bad.says))
        << launch.status() << "\nshould say: " << bad.says;
  }
}

}  // namespace
}  // namespace burst
