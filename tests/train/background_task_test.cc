#include "train/checkpoint/background_task.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace burst {
namespace {

TEST(BackgroundTask, RunsBesideItsCallerAndGivesItsResultOnce) {
  BackgroundTask task;
  EXPECT_FALSE(task.started());
  EXPECT_EQ(task.Wait(), absl::OkStatus());
  for (int round = 0; round < 3; ++round) {
    std::atomic<bool> go_on{false};
    task.Start([&] {
      while (!go_on) std::this_thread::yield();
      return absl::DataLossError("no room");
    });
    EXPECT_TRUE(task.started());
    EXPECT_TRUE(task.busy());
    go_on = true;
    while (task.busy()) std::this_thread::yield();
    EXPECT_TRUE(task.started()) << "its result is still to be fetched";
    EXPECT_EQ(task.Wait(), absl::DataLossError("no room"));
    EXPECT_FALSE(task.started());
    EXPECT_EQ(task.Wait(), absl::OkStatus());
  }
}

TEST(BackgroundTask, FinishesAndKeepsItsResult) {
  BackgroundTask task;
  task.Finish();
  std::atomic<bool> done{false};
  task.Start([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    done = true;
    return absl::DataLossError("no room");
  });
  task.Finish();
  EXPECT_TRUE(done);
  EXPECT_TRUE(task.started());
  task.Finish();
  EXPECT_EQ(task.Wait(), absl::DataLossError("no room"));
  EXPECT_FALSE(task.started());
}

TEST(BackgroundTask, ItsEndIsWaitedFor) {
  std::atomic<bool> done{false};
  {
    BackgroundTask task;
    task.Start([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      done = true;
      return absl::OkStatus();
    });
  }
  EXPECT_TRUE(done);
}

TEST(BackgroundTask, RequestsToStopAreNotDeliveredToIt) {
  sigset_t blocked;
  BackgroundTask task;
  task.Start([&] {
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    return absl::OkStatus();
  });
  EXPECT_EQ(task.Wait(), absl::OkStatus());
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
    EXPECT_EQ(sigismember(&blocked, signal), 1) << signal;
  }
  sigset_t own;
  pthread_sigmask(SIG_BLOCK, nullptr, &own);
  EXPECT_EQ(sigismember(&own, SIGTERM), 0);
}

}  // namespace
}  // namespace burst
