// Ends a process whose ranks have not moved for too long, and says where each of them is
// (progress.h).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace burst {

// While it lives, watches the ranks of this process and those that ProgressElsewhere reports. After
// `patience` without progress of any of them, prints a line for each rank of this process to stderr
// and ends the process with exit code 1. Ranks that only wait for one that works do not end it.
//
// Time in which the process itself was stopped (SIGSTOP) does not count.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::milliseconds patience);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void Watch();
  [[noreturn]] void End();

  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;  // last: it uses the others
};

// For transports that connect processes. They tell each other of progress, so that a process knows
// of a working rank elsewhere. A process that is about to end asks the others to report where their
// ranks are.

// Milliseconds since a rank of this process moved; 0 without a watchdog or ranks.
int64_t MsWithoutProgress();
// Records that a rank of another process moved `ms_ago` milliseconds ago.
void ProgressElsewhere(int64_t ms_ago);
// Prints where this process's ranks are. Only the first call does.
void ReportProgress();
// Sets the function that a watchdog calls before it ends the process. It asks the other processes
// to report.
void SetAskOthersToReport(std::function<void()> ask);

}  // namespace burst
