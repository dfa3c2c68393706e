// The trainer: one rank's part of a run. Every rank holds a whole replica, or with tensor
// parallelism its part of one, and its slice of every sequence; losses and gradients are summed
// over ranks, so all replicas take the same step.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "train/config/config.h"
#include "train/data/data.h"
#include "train/optimizer/adamw.h"
#include "train/optimizer/gradient_sum.h"
#include "train/report/metrics.h"
#include "train/setup.h"

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
  // With `enqueue_next`, the caller's next call is for the step after it: a GPU is given that one,
  // too, before the host waits for this one's results, so that it is never without work. Then the
  // model is not what this step made of it, but what the next one will.
  absl::StatusOr<StepMetrics> Step(int64_t step, bool enqueue_next = false);

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
  // A step that the device has work of.
  struct BegunStep {
    int64_t step = 0;
    double lr = 0;
    std::chrono::steady_clock::time_point begin;
  };
  absl::Status Begin(int64_t step);
  absl::StatusOr<StepMetrics> End();
  absl::StatusOr<bool> AnyRankStops();
  absl::Status Backpropagate(int64_t pass, double loss_scale, const Tensor& loss);
  // What comes after so many steps, before the next one begins.
  bool EvaluatesAfter(int64_t steps) const;
  bool SavesAfter(int64_t steps) const;
  absl::Status Checkpoint();
  absl::StatusOr<std::unique_ptr<Transformer>> WholeModel() const;
  absl::Status Sample();
  absl::Status Finish(double seconds);

  const TrainingSetup& setup_;
  const ResolvedConfig& config_;
  Communicator* const comm_;  // all ranks: sums of losses and gradients
  const int data_rank_;       // of this rank's group, which shares a part of the batch
  std::unique_ptr<Communicator> sequence_;  // the group's; null if comm_ is it, or this rank
  bool tensor_parallel_ = false;            // several ranks hold a model between them
  std::unique_ptr<SequenceParallelAttention> attention_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<GradientSum> gradients_;
  std::unique_ptr<AdamW> optimizer_;
  std::optional<Windows> windows_, validation_windows_;
  std::shared_ptr<const RingSchedule> schedule_;       // of every batch, unless packed
  std::deque<BegunStep> begun_;                        // by Begin, and not yet Ended; at most two
  std::array<std::unique_ptr<Readback>, 2> readback_;  // of their loss and norm, by step
  std::chrono::steady_clock::time_point ended_;        // the last End
  std::unique_ptr<Report> report_;
  int64_t step_ = 0;   // completed
  bool stop_ = false;  // a signal asked some rank to
};

}  // namespace burst
