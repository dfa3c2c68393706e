// A task on a thread of its own, one at a time: a checkpoint is written while training goes on.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace burst {

// Belongs to one thread, but for busy().
class BackgroundTask {
 public:
  BackgroundTask() = default;
  ~BackgroundTask();  // waits for the task
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  // The result of the task before must have been waited for. The task runs without a pool of
  // threads (burst/base/parallel.h), and requests to stop (burst/cli/process.h) do not interrupt
  // it.
  void Start(std::function<absl::Status()> task);
  // Returns whether a task was started and its result was not waited for yet.
  bool started() const { return started_; }
  // Whether a task is at work. From any thread.
  bool busy() const { return busy_.load(); }
  // Waits for the task; its result stays.
  void Finish();
  // Waits, and returns the task's result; OK if none was started since the last call.
  absl::Status Wait();

 private:
  bool started_ = false;
  std::atomic<bool> busy_{false};
  absl::Status result_;  // the thread's, until it ends
  std::thread thread_;
};

}  // namespace burst
