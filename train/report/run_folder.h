// The folder a run leaves: config.json, metrics.jsonl, checkpoint.safetensors, loss.svg.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "train/config/config.h"
#include "train/report/metrics.h"

namespace burst {

std::string CheckpointPath(const std::string& folder);

class RunFolder {
 public:
  // Makes the folder that the options name, or the next free runs/<model>-<number>. `resumed_step`:
  // the step of the checkpoint to continue from; 0: a new run, which must not find a checkpoint
  // there.
  static absl::StatusOr<RunFolder> Open(const ResolvedConfig& config, int64_t resumed_step);

  const std::string& path() const { return path_; }
  std::string checkpoint() const { return CheckpointPath(path_); }
  MetricsLog& metrics() { return metrics_; }
  const MetricsLog& metrics() const { return metrics_; }

  // Draws loss.svg from the metrics so far.
  absl::Status Plot(const std::string& title) const;

 private:
  RunFolder(std::string path, MetricsLog metrics)
      : path_(std::move(path)), metrics_(std::move(metrics)) {}

  std::string path_;
  MetricsLog metrics_;
};

}  // namespace burst
