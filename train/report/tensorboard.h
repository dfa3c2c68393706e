// Writes a run's metrics for TensorBoard: an event file next to metrics.jsonl, in TFRecord framing
// (tensorflow.org/tutorials/load_data/tfrecord). Each record is an Event of TensorFlow's
// event.proto. `tensorboard --logdir=runs` shows the runs of a folder.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/report/metrics.h"

namespace burst {

class TensorBoardLog {
 public:
  // Makes a new file events.out.tfevents.<time>.<host>.<pid> in `folder`. A run that continues
  // after `last_step` steps tells TensorBoard to drop later steps of earlier files.
  static absl::StatusOr<TensorBoardLog> Create(const std::string& folder, int64_t last_step);
  TensorBoardLog(TensorBoardLog&& other);
  TensorBoardLog& operator=(TensorBoardLog&&) = delete;
  ~TensorBoardLog();

  // Appends a step's scalars loss/train, lr, grad_norm, tokens_per_second and step_ms, and
  // those of kOptionalMetrics that the row has. The system gets them in one piece, so they outlive
  // the process.
  absl::Status Append(const StepMetrics& row);
  // Appends the values of a validation alone.
  absl::Status AppendValidation(const StepMetrics& row);

 private:
  TensorBoardLog(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  absl::Status Write(absl::string_view event);
  absl::Status WriteOptional(const StepMetrics& row, bool of_validation);

  std::string path_;
  int fd_ = -1;
};

}  // namespace burst
