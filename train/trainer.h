// The trainer: one rank's part of a run. Every rank holds a whole replica, or with tensor
// parallelism its part of one, and its slice of every sequence; losses and gradients are summed
// over ranks, so all replicas take the same step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "model/transformer.h"
#include "train/adamw.h"
#include "train/config.h"
#include "train/data.h"
#include "train/gradient_sum.h"
#include "train/metrics.h"
#include "train/training_setup.h"

namespace burst {

class Trainer {
 public:
  // Collective. `setup` and `comm` must outlive the trainer. Rank 0 opens the run folder and, with
  // `verbose`, prints.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(const TrainingSetup& setup,
                                                         Communicator* comm, bool verbose);
  ~Trainer();

  // Trains to the last step, or to the step in which a signal asked to stop; leaves the checkpoint
  // and the plot. Collective.
  absl::Status Train();

  // One optimizer step, number `step` from 0: the batch, forward and backward, update. Collective.
  absl::StatusOr<StepMetrics> Step(int64_t step);

  // Mean loss over the validation windows. Collective.
  absl::StatusOr<double> Evaluate();

  const Transformer& model() const { return *model_; }

 private:
  struct Report;  // rank 0: the run folder and the console

  Trainer(const TrainingSetup& setup, Communicator* comm);
  absl::Status Init(bool verbose);
  absl::Status Record(const StepMetrics& metrics);
  absl::Status NotFinite() const;
  absl::Status OpenReport(bool verbose, double peak_flops);
  absl::StatusOr<std::shared_ptr<const RingSchedule>> ScheduleFor(const GlobalBatch& batch);
  // The sequences of `count` that this rank's group works on: [first, second).
  std::pair<int64_t, int64_t> Share(int64_t count) const;
  // This rank's part of what a step trains on, in host memory.
  struct StepInput {
    int64_t step = -1;
    std::vector<SequenceBatch> passes;
    int64_t num_targets = 0;  // of all ranks and passes
  };
  absl::StatusOr<StepInput> Prepare(int64_t step);
  absl::StatusOr<Tensor> Backpropagate(const SequenceBatch& batch, double loss_scale,
                                       uint64_t dropout_step, bool last);
  absl::Status Checkpoint();
  absl::StatusOr<std::unique_ptr<Transformer>> WholeModel() const;
  absl::Status Sample();
  absl::Status Finish(double seconds);

  const TrainingSetup& setup_;
  const TrainConfig& options_;
  Communicator* const comm_;  // all ranks: sums of losses and gradients
  const int data_rank_;       // of this rank's group, which shares a part of the batch
  std::unique_ptr<Communicator> sequence_;  // the group's; null if comm_ is it, or this rank
  bool tensor_parallel_ = false;            // several ranks hold a model between them
  std::unique_ptr<SequenceParallelAttention> attention_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<GradientSum> gradients_;
  std::unique_ptr<AdamW> optimizer_;
  std::optional<Windows> windows_, validation_windows_;
  std::shared_ptr<const RingSchedule> schedule_;  // of every batch, unless packed
  StepInput next_;  // prepared while the device was at work on the step before
  std::unique_ptr<Report> report_;
  int64_t step_ = 0;   // completed
  bool stop_ = false;  // a signal asked some rank to
};

}  // namespace burst
