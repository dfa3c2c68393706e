// Saves a run that its launcher is about to kill. Open MPI kills the processes of a job a second
// after it has asked them to stop, which may be in the middle of a step. The state after the last
// whole step is in memory until the next update. A process that asks nobody (a fork, which sees the
// memory as it was) writes it out, however long that takes. Meanwhile this process goes on with its
// step.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "absl/status/status.h"

namespace burst {

// Lives on one thread, which changes the state; memory of the host only.
class SnapshotOnSignal {
 public:
  // When a signal asks the process to stop (InterruptSignal), and nothing changes the state, `save`
  // runs in a process of its own, which is not in this one's process group. It may use no
  // communicator and no thread but its own. It does not begin while `busy`, from any thread: this
  // process still writes an older save. Only between BeginSave and EndChange that may begin.
  SnapshotOnSignal(std::function<absl::Status()> save, std::function<bool()> busy);
  ~SnapshotOnSignal();
  SnapshotOnSignal(const SnapshotOnSignal&) = delete;
  SnapshotOnSignal& operator=(const SnapshotOnSignal&) = delete;

  // Between these two the state may change.
  void BeginChange() { change_.lock(); }
  void EndChange() { change_.unlock(); }
  // A change in which this process itself saves: begins when the other one, if any, has ended.
  void BeginSave();

 private:
  void Watch();
  bool LockedAndIdle();  // if so, the mutex is locked
  void Save();
  void AwaitSave();

  const std::function<absl::Status()> save_;
  const std::function<bool()> busy_;
  std::mutex mutex_;
  std::unique_lock<std::mutex> change_{mutex_, std::defer_lock};
  std::atomic<bool> done_{false};
  pid_t child_ = 0;     // that has not been waited for; guarded by the mutex
  std::thread thread_;  // last: it uses the others
};

}  // namespace burst
