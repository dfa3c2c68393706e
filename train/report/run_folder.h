// The folder a run leaves: config.json, metrics.jsonl, loss.svg and checkpoints
// (train/checkpoint/kept_checkpoints.h lists them, and says what a killed run leaves).
//
// Only rank 0's process writes to it. It locks the folder's file .lock before it reads the
// checkpoint or makes the first file, and until it ends. It replaces every file but metrics.jsonl
// in one piece. To metrics.jsonl it adds whole lines. On the disk there is a row for every step up
// to the newest checkpoint's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/cli/file_lock.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/config/config.h"
#include "train/report/metrics.h"

namespace burst {

// Returns the data cache's folder: --data_cache, or a folder next to the run's.
std::string DataCacheFolder(const ResolvedConfig& config);

// The lock on a run folder. Null, with a warning on stderr, on a file system that has no locks.
using RunLock = std::shared_ptr<const FileLock>;

// Locks a folder. FailedPrecondition names the holder if another run works there. With `wait`, for
// a job that follows one that is ending, it waits up to a minute and says so on stdout.
absl::StatusOr<RunLock> LockRunFolder(const std::string& folder, bool wait);

class RunFolder {
 public:
  // Makes and locks a new run's folder: the one that the options name, or the next free
  // runs/<model>-<number>. FailedPrecondition means that it holds a checkpoint, a model, or a file
  // with a run's name that no run made.
  static absl::StatusOr<RunFolder> Make(const ResolvedConfig& config);
  // Returns the folder of a run that continues from `resumed`, its newest checkpoint. `lock` is the
  // lock on that folder.
  static absl::StatusOr<RunFolder> Continue(const ResolvedConfig& config,
                                            const CheckpointInfo& resumed, RunLock lock);

  // Ends a complete run that was killed after its last save: names the best checkpoint, and removes
  // unused files. Returns whether there was something to do. `lock` is the lock on the folder.
  static absl::StatusOr<bool> Repair(const ResolvedConfig& config, const CheckpointInfo& resumed,
                                     const RunLock& lock);

  const std::string& path() const { return path_; }
  std::string checkpoint() const { return CheckpointPath(path_); }
  MetricsLog& metrics() { return metrics_; }
  const MetricsLog& metrics() const { return metrics_; }
  const KeptCheckpoints& checkpoints() const { return checkpoints_; }

  // Keeps a checkpoint that `write` writes to a path, atomically, on any thread, one at a time.
  // Meanwhile metrics() may be written to, but checkpoints() must not be used. FailedPrecondition
  // means that the lock's file is gone, so the folder may be another run's. Nothing is then
  // written. It may also mean that metrics.jsonl is gone after the save.
  absl::Status Save(const CheckpointInfo& info,
                    const std::function<absl::Status(const std::string& path)>& write);

  // Draws loss.svg from these metrics.
  absl::Status Plot(const std::string& title, const std::vector<StepMetrics>& rows) const;

 private:
  static absl::StatusOr<RunFolder> Open(const ResolvedConfig& config, std::string path,
                                        const CheckpointInfo* resumed, RunLock lock);
  RunFolder(std::string path, RunLock lock, MetricsLog metrics, KeptCheckpoints checkpoints)
      : path_(std::move(path)),
        lock_(std::move(lock)),
        metrics_(std::move(metrics)),
        checkpoints_(std::move(checkpoints)) {}

  std::string path_;
  RunLock lock_;
  MetricsLog metrics_;
  KeptCheckpoints checkpoints_;
};

}  // namespace burst
