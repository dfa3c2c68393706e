// Ranks of one run as processes, started one by one as srun does. When one of them ends, the others
// must end by themselves. Each may stand still at a place (pausing_train.cc).
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/faults/fault_run.h"

namespace burst {

class Ranks {
 public:
  // `command` is from FaultTest::Command; only its options count. Without --device=cuda the ranks
  // are on CPUs. `name` is the run's, for its files.
  Ranks(std::string folder, std::string name, int size, Arguments command)
      : folder_(std::move(folder)),
        name_(std::move(name)),
        size_(size),
        command_(std::move(command)),
        port_(NextPort()) {
    command_[0] = ProgramPath("tests/faults/pausing_train");
    const bool cuda =
        std::find(command_.begin(), command_.end(), "--device=cuda") != command_.end();
    if (!cuda) command_.push_back("--comm=tcp");
  }

  int size() const { return size_; }

  // Starts a process that says it is this rank. Several may say so.
  std::unique_ptr<Subprocess> Process(int rank, const Arguments& environment = {},
                                      const Arguments& options = {}) {
    const Arguments start = {"env", absl::StrCat("RANK=", rank), absl::StrCat("LOCAL_RANK=", rank),
                             absl::StrCat("WORLD_SIZE=", size_),
                             absl::StrCat("LOCAL_WORLD_SIZE=", size_), "MASTER_ADDR=localhost",
                             absl::StrCat("MASTER_PORT=", port_),
                             // Other tests' jobs may try the same port.
                             absl::StrCat("BURST_TOKEN=a token of test ", getpid(), ".", port_)};
    const std::string file = absl::StrCat(".", name_, ".", started_++);
    return std::make_unique<Subprocess>(Plus(Plus(start, environment), Plus(command_, options)),
                                        Subprocess::Options{folder_, /*mpi=*/false, file});
  }

  // Starts all ranks, of which `rank` stands still at the place. Returns once it does.
  void StartAndPause(int rank, const std::string& at) {
    Start(rank, {"PAUSE_AT=" + at, "PAUSE_FILE=" + PauseFile()});
    while (!IsPaused() && !processes_[rank]->Ended()) SleepMs(1);
    EXPECT_TRUE(IsPaused()) << "never comes to " << at << "\n" << processes_[rank]->Wait().err;
  }

  // Starts all ranks. One of them has additions to its environment.
  void Start(int special = 0, const Arguments& environment = {}) {
    for (int rank = 0; rank < size_; ++rank) {
      processes_.push_back(Process(rank, rank == special ? environment : Arguments()));
    }
  }

  void GoOn() const { std::remove(PauseFile().c_str()); }
  Subprocess& operator[](int rank) { return *processes_[rank]; }

 private:
  std::string PauseFile() const { return folder_ + "/" + name_ + ".pause"; }
  bool IsPaused() const { return access(PauseFile().c_str(), F_OK) == 0; }

  // Returns the first of the ports that a rendezvous tries.
  static int NextPort() {
    static int port = 20000 + getpid() % 600 * 16;
    return port += 16;
  }

  const std::string folder_, name_;
  const int size_;
  Arguments command_;
  const int port_;
  int started_ = 0;
  std::vector<std::unique_ptr<Subprocess>> processes_;
};

}  // namespace burst
