// Runs one task at a time on its own thread: a checkpoint is written while training goes on.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace burst {

// One thread uses the object; any thread may call busy().
class BackgroundTask {
 public:
  BackgroundTask() = default;
  ~BackgroundTask();  // waits for the task
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  // Starts a task. The caller must have waited for the previous one's result. The task runs without
  // a pool of threads (burst/base/parallel.h), and requests to stop (burst/cli/process.h) do not
  // interrupt it.
  void Start(std::function<absl::Status()> task);
  // Returns whether a task was started whose result nobody has waited for yet.
  bool started() const { return started_; }
  // Returns whether a task is at work. Any thread may call it.
  bool busy() const { return busy_.load(); }
  // Waits for the task and keeps its result.
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
