// Ends the work of GPU ranks when one of them fails. It keeps the first failure, which every rank's
// next call returns. A thread ends the program when ranks do not return. For gpu_communicator.cc.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/status/status.h"

namespace burst {

// The first failure of the ranks of this process. Thread-safe.
class FailureState {
 public:
  void Fail(const absl::Status& failure);  // only the first one counts
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  absl::Status failure() const;  // OK unless failed

 private:
  mutable std::mutex mutex_;
  absl::Status failure_;
  std::atomic<bool> failed_{false};
};

// Looks for errors in the background while ranks work. After a failure, it gives the ranks some
// seconds to return. Then it prints the failure and ends the program with exit code 1, unless it is
// told not to.
class FailureWatchdog {
 public:
  // background_error() returns an error that no call has returned, or OK. After a failure,
  // free_ranks() ends the waits of this process's ranks for their GPUs; it may be null.
  FailureWatchdog(FailureState* state, std::function<absl::Status()> background_error,
                  std::function<void()> free_ranks, bool ends_process = true)
      : state_(state),
        background_error_(std::move(background_error)),
        free_ranks_(std::move(free_ranks)),
        ends_process_(ends_process),
        thread_([this] { Watch(); }) {}
  ~FailureWatchdog();

  // Sets the failure and acts on it at once.
  void Fail(const absl::Status& failure);

 private:
  void Watch();

  FailureState* const state_;
  const std::function<absl::Status()> background_error_;
  const std::function<void()> free_ranks_;
  const bool ends_process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace burst
