// Tests ranks that are processes, connected by sockets: how the other ranks end when one is killed,
// stands still or gives up.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/socket.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "tests/comm/local_rendezvous.h"

namespace burst {
namespace {

using std::chrono::milliseconds;

// Ranks as processes that are forked from this one.
class Processes {
 public:
  // Every process runs body(communicator) and ends with its result as exit code. If the
  // communicator reports a failure, the process writes it to stderr and ends with exit code 1.
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
      alarm(60);  // ends a process that hangs
      dup2(fileno(err), STDERR_FILENO);
      if (rank != 0) listener.Close();
      auto connections =
          Rendezvous(Options(rank, world_size, port), rank == 0 ? std::move(listener) : Listener());
      if (!connections.ok()) Say(connections.status(), 99);
      TcpOptions own = options;
      own.on_failure = [](const absl::Status& failure) { Say(failure, 1); };
      int code;
      {
        const auto comm = TcpCommunicator::Create(rank, std::move(connections->links), own);
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

  // Returns the exit code (negative for a signal) and the output on stderr.
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

// Computes for ever, so that failures are noticed without its help.
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
    const std::string error = rank == 1 ? "error: " : "";  // the others' test has no such word
    EXPECT_EQ(processes.Wait(rank), std::pair(1, error + "rank 1 of 4 gave up: disk full\n"));
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
