// Reports a run on rank 0: in its folder and, unless it is silent, on the console.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/parameters.h"
#include "train/report/console.h"
#include "train/report/metrics.h"
#include "train/report/run_folder.h"
#include "train/report/tensorboard.h"
#include "train/run/setup.h"

namespace burst {

class RunReport {
 public:
  // The values that the trainer knows in addition to the setup.
  struct Facts {
    int64_t step = 0;  // completed, of a resumed run
    int64_t sequences_per_epoch = 0;
    Throughput throughput;
    ParameterList::KeptBytes kept;  // by rank 0
  };

  // Opens the run folder; with `prints`, prints a table of what will be trained on what.
  static absl::StatusOr<std::unique_ptr<RunReport>> Open(const TrainingSetup& setup,
                                                         const Facts& facts, bool prints);

  RunFolder& folder() { return folder_; }
  bool prints() const { return console_ != nullptr; }

  // Records a step's row of metrics.jsonl (and TensorBoard's scalars), or its evaluation in the
  // last row. LacksEvaluation: whether the last row is of that step and has no evaluation.
  absl::Status Record(const StepMetrics& metrics);
  absl::Status Evaluated(double val_loss);
  bool LacksEvaluation(int64_t step) const;
  // A step's line, and what else is to be said of it. `saved`: not tried to, or done; a step after
  // which the model is not finite is not saved.
  void Print(const StepMetrics& metrics, bool saved);
  void PrintEvaluation(int64_t step, double val_loss);
  // Call it after a save. Says once if only the newest checkpoint is kept, because the file system
  // has no hard links.
  void Saved();
  // The end of a run that was asked to stop after `step` steps.
  void Stopped(int64_t step);
  // The end of a complete run: its time, the most tensor memory this rank used, and a text that the
  // model wrote; may be empty.
  void Finished(int64_t steps, double seconds, int64_t peak_bytes, absl::string_view sample);

 private:
  explicit RunReport(RunFolder folder) : folder_(std::move(folder)) {}

  RunFolder folder_;
  std::unique_ptr<Console> console_;           // null: silent
  std::optional<TensorBoardLog> tensorboard_;  // none: not asked for
  bool told_of_links_ = false;
};

}  // namespace burst
