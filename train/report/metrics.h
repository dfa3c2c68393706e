// What every step did: metrics.jsonl, one JSON object a line, and its picture, loss.svg.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
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
  std::optional<double> val_loss;  // after the update
  bool skipped = false;            // not finite, so no update was made
};

class MetricsLog {
 public:
  // Opens `path` for appending. Rows of steps beyond `last_step`, and a last line cut short, are
  // dropped: 0 starts anew, a checkpoint's step continues its run.
  static absl::StatusOr<MetricsLog> Open(const std::string& path, int64_t last_step);

  // Writes a row through to the file. Not-a-number is written as null.
  absl::Status Append(const StepMetrics& row);

  // Adds the validation loss to the last row, of which there is one.
  absl::Status SetLastValLoss(double val_loss);

  const std::vector<StepMetrics>& rows() const { return rows_; }

 private:
  struct Close {
    void operator()(FILE* file) const { fclose(file); }
  };

  // Makes the file of the content, and appends from there on.
  absl::Status Rewrite(absl::string_view content);

  std::string path_;
  std::unique_ptr<FILE, Close> file_;
  std::vector<StepMetrics> rows_;
};

// loss.svg: training and validation loss by step.
std::string LossPlotSvg(absl::string_view title, const std::vector<StepMetrics>& rows);

}  // namespace burst
