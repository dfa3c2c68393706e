// Saves a run that its launcher is about to kill. Open MPI kills the processes of a job a second
// after it has asked them to stop, which may be in the middle of a step. The state after the last
// whole step is in memory until the next update. A forked process, which sees the memory as it was,
// writes it, however long that takes. Meanwhile this process goes on with its step.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "absl/status/status.h"

namespace burst {

// Belongs to the thread that changes the state, which must be in the host's memory.
class SnapshotOnSignal {
 public:
  // When a signal asks the process to stop (InterruptSignal) and nothing changes the state, `save`
  // runs in a forked process outside of this one's process group. It must not use communicators or
  // other threads. It does not begin while `busy`, which any thread may call, says that this
  // process still writes an older save. Such a write may begin only between BeginSave and
  // EndChange.
  SnapshotOnSignal(std::function<absl::Status()> save, std::function<bool()> busy);
  ~SnapshotOnSignal();
  SnapshotOnSignal(const SnapshotOnSignal&) = delete;
  SnapshotOnSignal& operator=(const SnapshotOnSignal&) = delete;

  // Between BeginChange and EndChange the state may change.
  void BeginChange() { change_.lock(); }
  void EndChange() { change_.unlock(); }
  // Begins a change in which this process itself saves. Waits for the forked process to end.
  void BeginSave();

 private:
  void Watch();
  bool LockedAndIdle();  // if it returns true, the mutex is locked
  void Save();
  void AwaitSave();

  const std::function<absl::Status()> save_;
  const std::function<bool()> busy_;
  std::mutex mutex_;
  std::unique_lock<std::mutex> change_{mutex_, std::defer_lock};
  std::atomic<bool> done_{false};
  pid_t child_ = 0;     // a process to wait for; guarded by the mutex
  std::thread thread_;  // last: it uses the others
};

}  // namespace burst
