// Writes the metrics of every step: metrics.jsonl, one JSON object a line, and the plot loss.svg.
#pragma once

#include <array>
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
  int64_t tokens = 0;  // tokens seen so far, with this step's
  double loss = 0;     // mean over targets before the update, in nats; NaN: no target counts
  double lr = 0;
  double grad_norm = 0;  // before clipping
  double tokens_per_second = 0;
  double step_ms = 0;
  // The idle time of a pipeline's stages divided by their busy time, summed over ranks. It is
  // measured from the begin of the first stage's first pass to the end of its last one, by the
  // devices' clocks. Waiting for messages and slower stages counts as idle time. PipelineBubble is
  // the value by the formula.
  std::optional<double> pipeline_bubble;
  // The time within step_ms that messages take from ranks, their mean. Threads on CPUs wait for
  // messages and slower ranks, copy and add up. On GPUs it is the time in which a rank's kernels
  // wait for messages.
  std::optional<double> exposed_ms;
  // Validation losses of the weights and of their average (--ema), after the update.
  std::optional<double> val_loss, val_loss_ema;
  bool skipped = false;  // loss or gradient was not finite, so there was no update
};

// A value that some rows lack.
struct OptionalMetric {
  const char* name;    // in metrics.jsonl
  const char* scalar;  // in TensorBoard
  std::optional<double> StepMetrics::*value;
  bool of_validation;  // the row gets it later
};
inline constexpr std::array<OptionalMetric, 4> kOptionalMetrics = {
    {{"pipeline_bubble", "pipeline_bubble", &StepMetrics::pipeline_bubble, false},
     {"exposed_ms", "exposed_ms", &StepMetrics::exposed_ms, false},
     {"val_loss", "loss/validation", &StepMetrics::val_loss, true},
     {"val_loss_ema", "loss/validation_ema", &StepMetrics::val_loss_ema, true}}};

class MetricsLog {
 public:
  // Opens `path` for appending. It drops rows of steps beyond `last_step`, a last line cut short,
  // and rows that do not follow the rows before them. A value of 0 starts anew; a checkpoint's step
  // continues its run.
  static absl::StatusOr<MetricsLog> Open(const std::string& path, int64_t last_step);
  MetricsLog(MetricsLog&& other);
  MetricsLog& operator=(MetricsLog&&) = delete;
  ~MetricsLog();

  // Gives a row to the system in one piece, so it outlives the process. Writes not-a-number as
  // null.
  absl::Status Append(const StepMetrics& row);
  // Flushes the rows to the disk, so they outlive a power failure.
  absl::Status Sync() const;

  // Returns FailedPrecondition if the path no longer leads to the file: the rows are lost.
  absl::Status CheckStillThere() const;

  // Adds the row's values of a validation to the last row in its place. There must be one.
  absl::Status SetLastValidation(const StepMetrics& row);

  const std::vector<StepMetrics>& rows() const { return rows_; }

 private:
  explicit MetricsLog(std::string path) : path_(std::move(path)) {}
  absl::Status WriteLastRow();
  absl::Status CannotWrite() const;

  std::string path_;
  int fd_ = -1;
  int64_t last_row_ = 0, end_ = 0;  // bytes before the last row, and of all rows
  std::vector<StepMetrics> rows_;
};

// Returns the rows of a metrics.jsonl, of rising steps. It leaves out lines that are not rows, such
// as a last one that a killed process cut short.
absl::StatusOr<std::vector<StepMetrics>> ReadMetrics(const std::string& path);

// Returns loss.svg: training and validation loss by step.
std::string LossPlotSvg(absl::string_view title, const std::vector<StepMetrics>& rows);

}  // namespace burst
