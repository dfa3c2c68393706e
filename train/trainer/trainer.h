// The trainer: the loop of one rank over the steps of a run, with its evaluations, saves and
// reports. Losses and gradients are reduced over ranks, so all replicas take the same step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/comm/communicator.h"
#include "burst/device/profiler.h"
#include "model/transformer.h"
#include "train/report/metrics.h"
#include "train/report/run_report.h"
#include "train/run/setup.h"
#include "train/trainer/evaluator.h"
#include "train/trainer/rank_state.h"
#include "train/trainer/run_saver.h"
#include "train/trainer/snapshot.h"
#include "train/trainer/step_runner.h"

namespace burst {

class Trainer {
 public:
  // Creates a trainer. Collective. `setup` and `comm` must outlive it. Rank 0 opens the run folder
  // and, with `verbose`, prints.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const TrainingSetup& setup,
                                                         Communicator* comm, bool verbose);
  ~Trainer();

  // Trains to the last step, or to the step in which a signal asked to stop. Leaves a checkpoint
  // and the plot. Collective.
  absl::Status Train();

  // Makes one optimizer step, number `step` from 0: batch, forward and backward, reduction, update.
  // Collective. `enqueue_next` says that the caller's next call is for the following step. A GPU
  // then gets that step, too, before the host waits for this one's results, so it always has work.
  // The model then has the next step's state, not this one's.
  absl::StatusOr<StepMetrics> Step(int64_t step, bool enqueue_next = false);

  // Returns the mean loss over the validation data; none if a signal asked some rank to stop.
  // Collective. The run must evaluate (--eval_every).
  absl::StatusOr<std::optional<double>> Evaluate() { return evaluator_->MeanLoss(); }

  const Transformer& model() const { return *rank_->model; }
  // Returns the bytes that this rank keeps between steps.
  ParameterList::KeptBytes kept_bytes() const { return rank_->kept_bytes(); }
  // Returns this rank's page-locked memory in bytes: offloaded state, and a save's copy.
  int64_t host_bytes() const;

 private:
  explicit Trainer(std::unique_ptr<RankState> rank);
  absl::Status MakeParts();
  absl::Status OpenReport(bool verbose);

  // Makes the next step, with the evaluation and the save that follow it.
  absl::Status TrainStep();
  bool EvaluatesAfter(int64_t steps) const;
  bool SavesAfter(int64_t steps) const;
  absl::Status EvaluateStep(StepMetrics* metrics);
  // Evaluates the weights and their average, if one is kept, for the row. Leaves it as it is if the
  // ranks stop. Collective.
  absl::Status Validate(StepMetrics* row);
  // Makes the evaluation during which the resumed run was stopped.
  absl::Status MakeUpEvaluation();
  // Begins to save the model after step `last`. Does nothing if the run cannot continue from it.
  absl::Status Save(const StepMetrics& last);
  // Makes the snapshot for a run whose launcher may kill it; null for other runs and ranks that do
  // not save.
  std::unique_ptr<SnapshotOnSignal> MakeSnapshot();
  absl::Status ReportEnd(double seconds);
  absl::Status NotFinite(absl::string_view what);

  const std::unique_ptr<RankState> rank_;
  const ResolvedConfig& config_;
  std::unique_ptr<RunReport> report_;  // only on rank 0
  RunSaver saver_;                     // uses the report
  StopAgreement stop_;
  LocalBatches batches_;
  std::unique_ptr<StepRunner> steps_;
  std::optional<Evaluator> evaluator_;  // only in a run that evaluates
  std::unique_ptr<SnapshotOnSignal> snapshot_;
  std::unique_ptr<ProfiledRange> profiled_;
  bool follows_ = false;                 // the next call of Step is for the next step
  bool saved_ = true;                    // the last step that asked for a save, if any, has one
  int64_t step_ = 0;                     // completed steps
  int skipped_ = 0;                      // steps since the last finite one
  std::optional<double> last_val_loss_;  // after the last step
};

}  // namespace burst
