// Ranks connected by sockets: the checks with ranks as threads, which is quick; and with ranks as
// processes what becomes of the others when one is killed, stands still or gives up.
#include "burst/comm/tcp/tcp_communicator.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/thread/thread_communicator.h"
#include "tests/comm/communicator_checks.h"

namespace burst {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

Socket ListenSomewhere() {
  absl::StatusOr<Socket> listener = Listen("127.0.0.1", 0);
  EXPECT_TRUE(listener.ok()) << listener.status();
  return *std::move(listener);
}

RendezvousOptions Options(int rank, int world_size, int port) {
  RendezvousOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.address = "127.0.0.1";
  options.port = port;
  options.num_ports = 1;
  options.job = "test";
  options.token = [] { return "the token of this test"; };
  options.timeout = std::chrono::seconds(60);
  return options;
}

// As RunRanks, over sockets; returns every rank's status.
std::vector<absl::Status> RunTcpRanks(int world_size,
                                      const std::function<absl::Status(TcpCommunicator&)>& body) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  std::vector<absl::Status> results(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = [&]() -> absl::Status {
        BURST_ASSIGN_OR_RETURN(Connections connections,
                               Rendezvous(Options(rank, world_size, port),
                                          rank == 0 ? std::move(listener) : Socket()));
        return body(*TcpCommunicator::Create(rank, std::move(connections.sockets), TcpOptions()));
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

class TcpRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(All, TcpRanks, testing::Values(1, 2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(TcpRanks, Checks) {
  const auto results = RunTcpRanks(GetParam(), [](TcpCommunicator& comm) {
    for (const CommunicatorCheck& check : CommunicatorChecks()) {
      SCOPED_TRACE(check.name);
      BURST_RETURN_IF_ERROR(check.run(comm, {}));
    }
    return absl::OkStatus();
  });
  EXPECT_EQ(results, std::vector<absl::Status>(GetParam()));
}

// The bits of an all-reduce do not depend on the transport.
TEST_P(TcpRanks, SumsEqualThoseOfThreads) {
  std::vector<uint64_t> here(GetParam()), there(GetParam());
  const auto digest = [](std::vector<uint64_t>& digests) {
    return [&](Communicator& comm) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(digests[comm.rank()], AllReduceDigest(comm));
      return absl::OkStatus();
    };
  };
  RunTcpRanks(GetParam(), digest(here));
  EXPECT_EQ(RunRanks(GetParam(), digest(there)), absl::OkStatus());
  EXPECT_EQ(here, there);
}

TEST(TcpCommunicator, LengthsMustAgree) {
  const auto results = RunTcpRanks(2, [](TcpCommunicator& comm) {
    char out[16] = {}, in[16];
    const SendBuffer send = {out, comm.rank() == 0 ? 16 : 8, 1 - comm.rank()};
    const ReceiveBuffer receive = {in, 16, 1 - comm.rank()};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    return comm.Wait(Channel::kRead);
  });
  EXPECT_EQ(results[0],
            absl::InvalidArgumentError("rank 0 of 2 expected 16 bytes from rank 1, which sent 8"));
  EXPECT_EQ(results[1], absl::OkStatus());
}

TEST(TcpCommunicator, WaitingForARankThatHasFinishedIsAnError) {
  const auto results = RunTcpRanks(3, [](TcpCommunicator& comm) {
    if (comm.rank() == 1) return absl::OkStatus();
    char byte;
    const ReceiveBuffer receive = {&byte, 1, 1};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive, 1}));
    return comm.Wait(Channel::kRead);
  });
  EXPECT_EQ(results[0], absl::UnavailableError("rank 0 of 3 waits for rank 1, which has finished"));
  EXPECT_EQ(results[2].code(), absl::StatusCode::kUnavailable);
}

TEST(TcpCommunicator, CarriesHostMemoryOnly) {
  const auto results = RunTcpRanks(1, [](TcpCommunicator& comm) {
    char byte;
    const SendBuffer send = {&byte, 1, 0, DeviceType::kCuda};
    return comm.Post(Channel::kRead, {&send, 1}, {});
  });
  EXPECT_EQ(results[0], absl::InvalidArgumentError("TCP carries host memory only"));
}

// Ranks as processes, forked from this one.
class Processes {
 public:
  // Every process runs body(communicator) and ends with its result as exit code. A failure that the
  // communicator tells of is written to stderr and ends it with exit code 1.
  Processes(int world_size, const TcpOptions& options,
            const std::function<int(TcpCommunicator&)>& body) {
    Socket listener = ListenSomewhere();
    const int port = listener.port();
    for (int rank = 0; rank < world_size; ++rank) {
      FILE* err = std::tmpfile();
      const pid_t pid = fork();
      if (pid != 0) {
        errs_.push_back(err);
        pids_.push_back(pid);
        continue;
      }
      alarm(60);  // whatever happens
      dup2(fileno(err), STDERR_FILENO);
      if (rank != 0) listener.Close();
      auto connections =
          Rendezvous(Options(rank, world_size, port), rank == 0 ? std::move(listener) : Socket());
      if (!connections.ok()) Say(connections.status(), 99);
      TcpOptions own = options;
      own.on_failure = [](const absl::Status& failure) { Say(failure, 1); };
      int code;
      {
        const auto comm = TcpCommunicator::Create(rank, std::move(connections->sockets), own);
        code = body(*comm);
      }
      std::_Exit(code);
    }
  }
  ~Processes() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] > 0) kill(pids_[rank], SIGKILL);
      if (pids_[rank] > 0) waitpid(pids_[rank], nullptr, 0);
      std::fclose(errs_[rank]);
    }
  }

  [[noreturn]] static void Say(const absl::Status& status, int code) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::fflush(stderr);
    std::_Exit(code);
  }

  void Signal(int rank, int signal) { kill(pids_[rank], signal); }

  // Exit code (negative: a signal) and what was written to stderr.
  std::pair<int, std::string> Wait(int rank) {
    int status = 0;
    waitpid(std::exchange(pids_[rank], 0), &status, 0);
    std::rewind(errs_[rank]);
    std::string text(4096, '\0');
    text.resize(std::fread(&text[0], 1, text.size(), errs_[rank]));
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), text};
  }

 private:
  std::vector<pid_t> pids_;
  std::vector<FILE*> errs_;
};

// Computes for ever: what happens is noticed without its help.
int Compute(TcpCommunicator& comm) {
  if (!comm.Barrier().ok()) return 98;
  while (true) pause();
}
int WaitForEver(TcpCommunicator& comm) {
  while (comm.Barrier().ok()) usleep(1000);
  pause();  // the failure itself ends the process
  return 97;
}

TEST(TcpProcesses, AKilledRankIsNamedByAllOthers) {
  for (const auto& body : {Compute, WaitForEver}) {
    Processes processes(4, TcpOptions(), body);
    usleep(300'000);
    processes.Signal(2, SIGKILL);
    for (int rank : {0, 1, 3}) {
      EXPECT_EQ(processes.Wait(rank),
                std::pair(1, std::string("rank 2 of 4 was lost: its connection closed\n")));
    }
  }
}

TEST(TcpProcesses, RankZeroMayBeTheOneThatIsKilled) {
  Processes processes(3, TcpOptions(), Compute);
  usleep(300'000);
  processes.Signal(0, SIGKILL);
  for (int rank : {1, 2}) {
    EXPECT_EQ(processes.Wait(rank),
              std::pair(1, std::string("rank 0 of 3 was lost: its connection closed\n")));
  }
}

TEST(TcpProcesses, ARankThatStandsStillIsLost) {
  TcpOptions options;
  options.heartbeat = milliseconds(200);
  options.lost_after = milliseconds(2000);
  Processes processes(3, options, Compute);
  usleep(500'000);
  processes.Signal(1, SIGSTOP);
  for (int rank : {0, 2}) {
    const auto [code, text] = processes.Wait(rank);
    EXPECT_EQ(code, 1);
    EXPECT_TRUE(absl::StrContains(text, "rank 1 of 3 was lost: nothing heard of it for 2")) << text;
  }
}

TEST(TcpProcesses, ARankThatExitsWithoutAWordIsLost) {
  Processes processes(3, TcpOptions(), [](TcpCommunicator& comm) {
    if (!comm.Barrier().ok()) return 98;
    if (comm.rank() == 1) std::_Exit(3);
    return WaitForEver(comm);
  });
  EXPECT_EQ(processes.Wait(1), std::pair(3, std::string()));
  for (int rank : {0, 2}) {
    EXPECT_EQ(processes.Wait(rank),
              std::pair(1, std::string("rank 1 of 3 was lost: its connection closed\n")));
  }
}

TEST(TcpProcesses, AbortTellsTheOthersWhy) {
  Processes processes(4, TcpOptions(), [](TcpCommunicator& comm) {
    const auto group = comm.Split(comm.rank() / 2, 0);
    if (!group.ok()) return 98;
    if (comm.rank() == 1) comm.Abort(absl::InternalError("disk full"));
    return Compute(comm);
  });
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(processes.Wait(rank),
              std::pair(1, std::string("rank 1 of 4 gave up: INTERNAL: disk full\n")));
  }
}

// Ranks may continue after another rank has finished its work.
TEST(TcpProcesses, FinishingIsNoLoss) {
  Processes processes(3, TcpOptions(), [](TcpCommunicator& comm) {
    if (!comm.Barrier().ok()) return 98;
    if (comm.rank() == 0) return 0;
    usleep(1'500'000);
    const int other = 3 - comm.rank();
    char byte = 1;
    const SendBuffer send = {&byte, 1, other};
    const ReceiveBuffer receive = {&byte, 1, other};
    if (!comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}).ok()) return 97;
    return comm.Wait(Channel::kRead).ok() ? 0 : 96;
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(processes.Wait(rank), std::pair(0, std::string()));
  }
}

}  // namespace
}  // namespace burst
