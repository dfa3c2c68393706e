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
#include "train/report/run_facts.h"
#include "train/report/run_folder.h"
#include "train/report/tensorboard.h"
#include "train/run/setup.h"

namespace burst {

class RunReport {
 public:
  // Values that the trainer knows in addition to the setup.
  struct Facts {
    int64_t step = 0;  // the completed steps of a resumed run
    int64_t sequences_per_epoch = 0;
    Throughput throughput;
    ParameterList::KeptBytes kept;  // the bytes that rank 0 keeps
  };

  // Opens the run folder. With `prints`, prints a table of the model and the data.
  static absl::StatusOr<std::unique_ptr<RunReport>> Open(const TrainingSetup& setup,
                                                         const Facts& facts, bool prints);

  RunFolder& folder() { return folder_; }
  bool prints() const { return console_ != nullptr; }

  // Records a step's row of metrics.jsonl (and TensorBoard's scalars), or its evaluation in the
  // last row. LacksEvaluation returns whether the last row is that step's and has no evaluation.
  absl::Status Record(const StepMetrics& metrics);
  absl::Status Evaluated(const StepMetrics& row);
  bool LacksEvaluation(int64_t step) const;
  // Prints a step's line and remarks. `saved` is false if a save was due and the model was not
  // finite.
  void Print(const StepMetrics& metrics, bool saved);
  void PrintEvaluation(const StepMetrics& row);
  // Call it after a save. Says once if only the newest checkpoint is kept, because the file system
  // has no hard links.
  void Saved();
  // Prints the end of a run that was asked to stop after `step` steps.
  void Stopped(int64_t step);
  // Prints the end of a complete run: its time, the most tensor memory that this rank used, and a
  // text by the model, which may be empty.
  void Finished(int64_t steps, double seconds, int64_t peak_bytes, absl::string_view sample);

 private:
  explicit RunReport(RunFolder folder) : folder_(std::move(folder)) {}

  RunFolder folder_;
  RunFacts facts_;
  std::unique_ptr<Console> console_;           // null: the run is silent
  std::optional<TensorBoardLog> tensorboard_;  // none: without --tensorboard
  bool told_of_links_ = false;
};

}  // namespace burst
