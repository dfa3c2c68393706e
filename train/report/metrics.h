// Writes the metrics of every step: metrics.jsonl, one JSON object a line, and the plot loss.svg.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

struct StepMetrics {
  int64_t step = 0;    // 1 for the first
  int64_t tokens = 0;  // seen so far, this step's included
  double loss = 0;     // mean over the step's targets, before its update; nats
  double lr = 0;
  double grad_norm = 0;  // before clipping
  double tokens_per_second = 0;
  double step_ms = 0;
  // Idle time of a pipeline's stages divided by their busy time, summed over ranks. It is measured
  // from the begin of the first stage's first pass to the end of its last one, by the devices'
  // clocks. Messages and slower stages count as idle time where other stages wait for them.
  // PipelineBubble is the value by the formula.
  std::optional<double> pipeline_bubble;
  std::optional<double> val_loss;  // after the update
  bool skipped = false;            // not finite, so no update was made
};

class MetricsLog {
 public:
  // Opens `path` for appending. It drops rows of steps beyond `last_step`, a last line cut short,
  // and rows that do not follow the rows before them. A value of 0 starts anew; a checkpoint's step
  // continues its run.
  static absl::StatusOr<MetricsLog> Open(const std::string& path, int64_t last_step);
  MetricsLog(MetricsLog&& other);
  MetricsLog& operator=(MetricsLog&&) = delete;
  ~MetricsLog();

  // Hands a row to the system, in one piece: it outlives the process. Not-a-number is written as
  // null.
  absl::Status Append(const StepMetrics& row);
  // Flushes the rows to the disk: they outlive the machine's power.
  absl::Status Sync() const;

  // FailedPrecondition where the path no longer leads to the file: the rows are lost.
  absl::Status CheckStillThere() const;

  // Adds the validation loss to the last row, of which there is one, in its place.
  absl::Status SetLastValLoss(double val_loss);

  const std::vector<StepMetrics>& rows() const { return rows_; }

 private:
  explicit MetricsLog(std::string path) : path_(std::move(path)) {}
  absl::Status WriteLastRow();
  absl::Status CannotWrite() const;

  std::string path_;
  int fd_ = -1;
  int64_t last_row_ = 0, end_ = 0;  // bytes before the last row, and in all
  std::vector<StepMetrics> rows_;
};

// loss.svg: training and validation loss by step.
std::string LossPlotSvg(absl::string_view title, const std::vector<StepMetrics>& rows);

}  // namespace burst
