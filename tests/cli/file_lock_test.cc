#include "burst/cli/file_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

// A process that holds the lock until it is killed.
class Holder {
 public:
  explicit Holder(
      const std::string& path, const std::function<void()>& then = [] {}) {
    int ready[2];
    EXPECT_EQ(pipe(ready), 0);
    pid_ = fork();
    if (pid_ == 0) {
      const auto lock = FileLock::TryAcquire(path);
      then();
      if (lock.ok() && write(ready[1], "", 1) == 1) pause();
      _exit(1);
    }
    close(ready[1]);
    char byte;
    EXPECT_EQ(read(ready[0], &byte, 1), 1) << "the child did not get the lock";
    close(ready[0]);
  }
  ~Holder() { Kill(); }

  void Kill() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

TEST(FileLock, RefusesASecondHolderAndNamesTheFirst) {
  const std::string path = FreshTestFolder() + "/lock";
  Holder holder(path);
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  const auto second = FileLock::TryAcquire(path);
  ASSERT_TRUE(absl::IsUnavailable(second.status())) << second.status();
  for (const std::string& part : {path, absl::StrCat("pid ", holder.pid(), " on ", host),
                                  std::string(" UTC: "), std::string("file_lock_test")}) {
    EXPECT_TRUE(absl::StrContains(second.status().message(), part)) << second.status();
  }
  // Asking does not erase the holder's name.
  EXPECT_EQ(FileLock::TryAcquire(path).status(), second.status());
}

TEST(FileLock, EndsWithItsHolderHoweverThatEnds) {
  const std::string path = FreshTestFolder() + "/lock";
  Holder killed(path);
  ASSERT_FALSE(FileLock::TryAcquire(path).ok());
  killed.Kill();
  ASSERT_TRUE(FileLock::TryAcquire(path).ok());
  EXPECT_EQ(ReadAll(path), "") << "the last holder's name goes with it";
  EXPECT_TRUE(FileLock::TryAcquire(path).ok());
}

TEST(FileLock, AProgramThatTheHolderStartedDoesNotKeepIt) {
  const std::string path = FreshTestFolder() + "/lock";
  int child_pid[2];
  ASSERT_EQ(pipe(child_pid), 0);
  Holder holder(path, [&] {
    const pid_t child = fork();
    if (child == 0) execlp("sleep", "sleep", "60", nullptr);
    // The loop waits until the child is another program.
    std::string name;
    while (name != "sleep\n") name = ReadAll(absl::StrCat("/proc/", child, "/comm"));
    EXPECT_EQ(write(child_pid[1], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  });
  pid_t child = 0;
  ASSERT_EQ(read(child_pid[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  holder.Kill();
  EXPECT_EQ(kill(child, 0), 0) << "still running";
  EXPECT_TRUE(FileLock::TryAcquire(path).ok());
  kill(child, SIGKILL);
}

TEST(FileLock, WaitsForItsHolderAndSaysSo) {
  const std::string path = FreshTestFolder() + "/lock";
  Holder holder(path);
  int told = 0;
  double waited = -1;
  const auto lock = FileLock::Acquire(path, [&](const std::string& name, double seconds) {
    EXPECT_TRUE(absl::StrContains(name, absl::StrCat("pid ", holder.pid()))) << name;
    EXPECT_GT(seconds, waited);
    waited = seconds;
    if (++told == 2) holder.Kill();
    return absl::OkStatus();
  });
  EXPECT_TRUE(lock.ok()) << lock.status();
  EXPECT_EQ(told, 2);
  EXPECT_GE(waited, 1);
  EXPECT_TRUE(absl::StrContains(ReadAll(path), absl::StrCat("pid ", getpid(), " ")));
}

TEST(FileLock, GivesUpWaitingWhenItIsTold) {
  const std::string path = FreshTestFolder() + "/lock";
  Holder holder(path);
  const auto lock = FileLock::Acquire(path, [](const std::string&, double seconds) {
    return seconds > 0.5 ? absl::DeadlineExceededError("enough") : absl::OkStatus();
  });
  EXPECT_EQ(lock.status(), absl::DeadlineExceededError("enough"));
}

TEST(FileLock, OneOfManyGetsIt) {
  const std::string path = FreshTestFolder() + "/lock";
  for (int round = 0; round < 20; ++round) {
    std::optional<absl::StatusOr<FileLock>> locks[8];
    std::vector<std::thread> threads;
    for (auto& lock : locks) {
      threads.emplace_back([&] { lock.emplace(FileLock::TryAcquire(path)); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(std::count_if(std::begin(locks), std::end(locks), [](auto& l) { return l->ok(); }),
              1);
  }
}

TEST(FileLock, WhatIsNoFileIsRefused) {
  const std::string folder = FreshTestFolder(), other = folder + "/other";
  std::ofstream(other) << "precious";
  std::filesystem::create_symlink(other, folder + "/link");
  ASSERT_EQ(mkfifo((folder + "/pipe").c_str(), 0600), 0);
  for (const char* name : {"/link", "/pipe", ""}) {
    const auto lock = FileLock::TryAcquire(folder + name);
    EXPECT_TRUE(absl::IsFailedPrecondition(lock.status())) << name << lock.status();
    EXPECT_TRUE(absl::StrContains(lock.status().message(), folder + name)) << lock.status();
  }
  EXPECT_EQ(ReadAll(other), "precious");
  EXPECT_TRUE(absl::IsNotFound(FileLock::TryAcquire(folder + "/missing/lock").status()));

  // The error is one line for any bytes in the file.
  Holder holder(folder + "/lock");
  std::ofstream(folder + "/lock", std::ios::binary) << std::string(100000, '\n') << "\x1b[2J";
  const std::string message(FileLock::TryAcquire(folder + "/lock").status().message());
  EXPECT_TRUE(absl::StrContains(message, "has not given its name")) << message;
}

}  // namespace
}  // namespace burst
