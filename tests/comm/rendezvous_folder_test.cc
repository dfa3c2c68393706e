// How processes of one host find each other in a folder.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/socket.h"
#include "tests/comm/local_rendezvous.h"
#include "tests/comm/meeting.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

using std::chrono::milliseconds;

class InAFolder : public testing::Test {
 protected:
  void SetUp() override {
    path_ = FreshTestFolder();
    folder_ = FolderAt(path_);
  }
  std::vector<RendezvousOptions> Ranks(int world_size) const {
    std::vector<RendezvousOptions> all = AllOptions(world_size, 1234);
    for (RendezvousOptions& options : all) {
      options.folder = folder_;
      options.token = "";
    }
    return all;
  }
  int FilesLeft() const {
    const auto files = std::filesystem::directory_iterator(path_);
    return static_cast<int>(std::distance(begin(files), end(files)));
  }

  std::string path_;
  std::optional<SocketFolder> folder_;
};

TEST_F(InAFolder, EveryTwoRanksConnect) {
  const Outcome outcome = Meet(Ranks(5));
  ExpectOk(outcome);
  EXPECT_EQ(outcome.strangers, std::vector<int>(5));
  EXPECT_EQ(FilesLeft(), 0);
}

// Two jobs have one name, and no rank of one meets the other's.
TEST_F(InAFolder, JobsOfOneNameMeetOneAfterTheOther) {
  std::vector<RendezvousOptions> ranks = Ranks(2);
  std::vector<absl::Status> statuses(4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] { statuses[i] = Rendezvous(ranks[i / 2]).status(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(statuses, std::vector<absl::Status>(4));
  EXPECT_EQ(FilesLeft(), 0);
}

// Another token, port or name distinguishes jobs.
TEST_F(InAFolder, OtherJobsDoNotMeet) {
  std::vector<RendezvousOptions> ranks = Ranks(2);
  for (RendezvousOptions& options : ranks) options.timeout = milliseconds(500);
  const RendezvousOptions plain = ranks[1];
  for (int difference = 0; difference < 3; ++difference) {
    ranks[1] = plain;
    if (difference == 0) ranks[1].token = kToken;
    if (difference == 1) ranks[1].port = 4321;
    if (difference == 2) ranks[1].job = "another";
    const auto statuses = Meet(ranks).statuses;
    EXPECT_EQ(statuses[0].message(), "rank 0 waited 0.5 s in vain for rank 1 of 2");
    EXPECT_TRUE(absl::StrContains(statuses[1].message(), "found no rank 0 at " + path_))
        << statuses[1];
  }
}

TEST_F(InAFolder, WhatAKilledProcessLeftIsReplaced) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(20);
    (void)Rendezvous(Ranks(2)[0]);
    std::_Exit(0);
  }
  while (FilesLeft() < 2) std::this_thread::sleep_for(milliseconds(5));  // the socket and its lock
  std::this_thread::sleep_for(milliseconds(100));
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  EXPECT_EQ(FilesLeft(), 2);
  ExpectOk(Meet(Ranks(2)));
  EXPECT_EQ(FilesLeft(), 0);
}

// This holds even if the folder is open to all.
TEST_F(InAFolder, AnotherUserIsAStranger) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  constexpr uid_t kNobody = 65534;
  std::vector<RendezvousOptions> ranks = Ranks(2);
  pid_t pid = 0;
  const Outcome outcome = Meet(ranks, Listener(), [&] {
    while (FilesLeft() < 2) std::this_thread::sleep_for(milliseconds(5));
    std::string name;
    for (const auto& file : std::filesystem::directory_iterator(path_)) {
      if (file.path().extension() == ".0") name = file.path().filename();
      chmod(file.path().c_str(), 0777);
    }
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    ASSERT_LT(name.size(), sizeof(address.sun_path)) << name;
    name.copy(address.sun_path, name.size());
    const auto connects = [&] {
      pid = fork();
      if (pid == 0) {
        const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        const bool connected =
            chdir(path_.c_str()) == 0 && setuid(kNobody) == 0 &&
            connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
        char byte;
        std::_Exit(connected ? 10 + static_cast<int>(recv(fd, &byte, 1, 0)) : 1);
      }
      int status = 0;
      waitpid(pid, &status, 0);
      return WEXITSTATUS(status);
    };
    EXPECT_EQ(connects(), 1) << "a folder of mode 700";
    chmod(path_.c_str(), 0755);
    EXPECT_EQ(connects(), 10) << "is hung up";
  });
  ExpectOk(outcome);
  EXPECT_EQ(outcome.strangers[0], 1);
}

}  // namespace
}  // namespace burst
