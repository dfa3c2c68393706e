// The trainer: one rank's part of a run. Every rank owns its tokens of every sequence, and a whole
// replica of the model. With tensor parallelism it owns its part of a replica, in a pipeline the
// layers of its stage. Losses and gradients are reduced over ranks, so all replicas take the same
// step. With --zero the ranks divide what they would otherwise all have (ShardedState).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/device/device.h"
#include "burst/device/event.h"
#include "model/transformer.h"
#include "train/config/config.h"
#include "train/data/batch.h"
#include "train/optimizer/adamw.h"
#include "train/optimizer/gradient_reducer.h"
#include "train/optimizer/sharded_state.h"
#include "train/pipeline/pass_times.h"
#include "train/pipeline/pipeline.h"
#include "train/report/metrics.h"
#include "train/report/run_report.h"
#include "train/run_saver.h"
#include "train/setup.h"
#include "train/snapshot.h"

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

  // One optimizer step, number `step` from 0: batch, forward and backward, reduction, update.
  // Collective. `enqueue_next` says that the caller's next call is for the following step. A GPU is
  // then given that step, too, before the host waits for this one's results, so that it always has
  // work. The model then has the next step's state, not this one's.
  //
  // step_ms is time on the device (DeviceEvent), to this step's end. It begins with the end of the
  // step before if that one had `enqueue_next`, else with this step's own begin.
  absl::StatusOr<StepMetrics> Step(int64_t step, bool enqueue_next = false);

  // Mean loss over the validation data; none if a signal asked some rank to stop. Collective.
  absl::StatusOr<std::optional<double>> Evaluate();

  const Transformer& model() const { return *model_; }
  // Page-locked memory of this rank: offloaded state, and the copy that a save takes.
  int64_t host_bytes() const;

 private:
  // A step that the device has the work of.
  struct EnqueuedStep {
    int64_t step = 0;
    double lr = 0;
    bool follows = false;  // straight on the step before
  };
  // Its loss and gradient norm, and when it began and ended.
  struct StepResults {
    explicit StepResults(DeviceType device)
        : loss_and_norm(device), begin(device), end(device), passes(device) {}

    Readback loss_and_norm;
    DeviceEvent begin;  // of a step that does not follow another
    DeviceEvent end;
    PassTimes passes;  // of a pipeline
  };

  Trainer(const TrainingSetup& setup, Communicator* comm);
  absl::Status Init(bool verbose);
  absl::Status MakeAttention(Communicator* group);
  absl::Status CreateModel();  // and its optimizer
  absl::Status Load();         // the run that is resumed
  absl::Status LoadWeights();  // of a new run that starts from those of another model
  absl::Status OpenReport(bool verbose);

  absl::Status Enqueue(int64_t step, bool follows);
  absl::StatusOr<StepMetrics> Complete();
  // StepMetrics::pipeline_bubble. Waits until the device has ended the passes. Collective.
  absl::StatusOr<double> PipelineBubbleOf(const PassTimes& passes);
  // Whether the condition holds on some rank. Collective.
  absl::StatusOr<bool> OnAnyRank(bool condition);
  absl::Status AnyRankStops();
  // Runs micro-batches [first, first + count).
  absl::Status ForwardBackward(int64_t first, int64_t count, double loss_scale, const Tensor& loss);
  absl::Status ForwardBackwardOne(int64_t micro_batch, double loss_scale, const Tensor& loss,
                                  bool first, bool last);
  absl::Status ForwardBackwardInPipeline(int64_t first, int64_t count, double loss_scale,
                                         const Tensor& loss);
  // This rank's part of a micro-batch, and where its dropout is drawn.
  absl::StatusOr<Pipeline::MicroBatch> MicroBatch(int64_t number);
  // Completes the reduction of the gradients; norm, [1] float64, becomes the whole gradient's.
  absl::Status FinishGradients(const Tensor& norm);
  // AdamW, and what the ranks exchange after it.
  absl::Status Update(const Tensor& loss_and_norm, double lr);
  // The tokens of a step, over all ranks.
  int64_t step_tokens() const { return config_.accumulate * config_.batch * config_.seqlen; }
  // The sequences of `count` that are this rank's group's share: [first, second).
  std::pair<int64_t, int64_t> Share(int64_t count) const;
  // This rank's tokens of `batch`, which were checked, on its device.
  absl::StatusOr<SequenceBatch> LocalBatch(const GlobalBatch& batch);
  // The loss of this rank's tokens, unscaled, without a gradient; null on a stage that does not
  // compute it.
  absl::StatusOr<Tensor> LossOf(const SequenceBatch& batch);

  // What comes after step number `steps`, before the next one.
  bool EvaluatesAfter(int64_t steps) const;
  bool SavesAfter(int64_t steps) const;
  absl::Status EvaluateStep(StepMetrics* metrics);
  absl::Status MakeUpEvaluation();
  // For a run whose launcher may kill it; null for others, and on ranks that do not save.
  std::unique_ptr<SnapshotOnSignal> MakeSnapshot();
  bool WeightsAreFinite() const;
  absl::StatusOr<bool> IsSound(const StepMetrics& last);
  bool StateIsFinite() const;
  absl::StatusOr<bool> Checkpoint(const StepMetrics& last);
  absl::Status NotFinite(absl::string_view what);
  // A text by the model as it was just saved; empty where there is nothing to print. Rank 0's.
  absl::StatusOr<std::string> Sample() const;

  const TrainingSetup& setup_;
  const ResolvedConfig& config_;
  Communicator* const comm_;  // all ranks: reduces losses
  const int data_rank_;       // of this rank's group, which shares a part of the batch
  // This rank's groups in the mesh; null where it is alone, or for a sequence where comm_ is it.
  std::unique_ptr<Communicator> sequence_, tensor_;
  std::unique_ptr<Communicator> own_stage_;  // of a pipeline
  Communicator* stage_;  // the ranks that have the same layers: own_stage_, or comm_
  std::unique_ptr<SequenceParallelAttention> attention_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<Pipeline> pipeline_;          // null: one stage
  std::unique_ptr<GradientReducer> gradients_;  // null where shards_ reduces them
  std::unique_ptr<ShardedState> shards_;        // with --zero, else null
  std::unique_ptr<AdamW> optimizer_;
  std::optional<SequenceSampler> training_data_, validation_data_;
  std::optional<GlobalBatch> sequences_;                 // of the last micro-batch
  std::shared_ptr<const AttentionSchedule> schedule_;    // of every batch, unless packed
  std::deque<EnqueuedStep> enqueued_;                    // and not yet completed; at most two
  std::array<std::unique_ptr<StepResults>, 3> results_;  // by step: those two, and the one before
  bool follows_ = false;               // the next call of Step is for the next step
  std::unique_ptr<RunReport> report_;  // rank 0's
  std::unique_ptr<RunSaver> saver_;
  std::unique_ptr<SnapshotOnSignal> snapshot_;
  int64_t step_ = 0;                     // completed
  int skipped_ = 0;                      // steps since the last one that was finite
  std::optional<double> last_val_loss_;  // after the last step
  bool stop_ = false;                    // a signal asked some rank to
};

}  // namespace burst
