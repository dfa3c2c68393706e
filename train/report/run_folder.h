// The folder a run leaves: config.json, metrics.jsonl, loss.svg and checkpoints
// (train/checkpoint/kept_checkpoints.h says which, and what holds when a run is killed).
//
// One process writes to it, rank 0's. It holds the lock on the folder's file .lock from before it
// reads the checkpoint, or makes the first file, until it ends. Every file but metrics.jsonl is
// replaced in one piece. metrics.jsonl grows by whole lines, and on the disk has a row for every
// step up to the newest checkpoint's.
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

// FailedPrecondition that names the holder, when another run is at work there. With `wait`, for a
// job that takes over from one that is ending: waits for it up to a minute, and says so on stdout.
absl::StatusOr<RunLock> LockRunFolder(const std::string& folder, bool wait);

class RunFolder {
 public:
  // A new run's: makes the folder that the options name, or the next free runs/<model>-<number>,
  // and locks it. FailedPrecondition where it holds a checkpoint, a model, or a file of one of a
  // run's names that is not a run's.
  static absl::StatusOr<RunFolder> Make(const ResolvedConfig& config);
  // Returns the folder of a run that continues from `resumed`, its newest checkpoint. `lock`: the
  // lock on that folder.
  static absl::StatusOr<RunFolder> Continue(const ResolvedConfig& config,
                                            const CheckpointInfo& resumed, RunLock lock);

  // Does what a run did not come to that is complete and was killed after its last save: the best
  // checkpoint, and what no checkpoint needs. Whether there was something. `lock`: on the folder.
  static absl::StatusOr<bool> Repair(const ResolvedConfig& config, const CheckpointInfo& resumed,
                                     const RunLock& lock);

  const std::string& path() const { return path_; }
  std::string checkpoint() const { return CheckpointPath(path_); }
  MetricsLog& metrics() { return metrics_; }
  const MetricsLog& metrics() const { return metrics_; }
  const KeptCheckpoints& checkpoints() const { return checkpoints_; }

  // Keeps a checkpoint that `write` writes to a path, atomically. On any thread, one at a time;
  // metrics() may be written to meanwhile, checkpoints() not be looked at. FailedPrecondition, and
  // nothing is written, where the lock's file is gone: the folder may be another run's by now.
  // Also, after the save, where metrics.jsonl is gone.
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
