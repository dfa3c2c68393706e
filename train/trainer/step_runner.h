// The optimizer steps of one rank: micro-batches, forward and backward, the reduction of gradients,
// the update, and the step's results.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/device/event.h"
#include "burst/tensor/tensor.h"
#include "train/data/batch.h"
#include "train/pipeline/pass_times.h"
#include "train/pipeline/pipeline.h"
#include "train/report/metrics.h"
#include "train/trainer/local_batches.h"
#include "train/trainer/rank_state.h"

namespace burst {

class StepRunner {
 public:
  // `rank` and `batches` must outlive the object. before_update is called before the state changes.
  StepRunner(RankState* rank, LocalBatches* batches, SequenceSampler data,
             std::function<void()> before_update);

  // Sequences that an epoch visits.
  int64_t sequences_per_epoch() const { return data_.per_epoch(); }

  // Gives the device the work of step number `step`, from 0. At most two steps wait for Complete.
  // `follows`: the step comes straight after the step before. Collective.
  absl::Status Enqueue(int64_t step, bool follows);
  // Waits for the results of the step that was enqueued first. Collective. step_ms is time on the
  // device. It begins with the end of the step before if this step follows it, else with its own.
  absl::StatusOr<StepMetrics> Complete();
  // The number of the step that Complete would return; none if nothing is enqueued.
  std::optional<int64_t> first_enqueued() const;

  // Whether the weights and optimizer states of all ranks, and the loss and gradient of the next
  // micro-batch after `steps` steps, are finite. An update may leave finite weights that are so
  // large that nothing computed with them is. The gradients are not kept. Collective.
  absl::StatusOr<bool> CanContinue(int64_t steps);

 private:
  // A step that the device has the work of.
  struct EnqueuedStep {
    int64_t step = 0;
    double lr = 0;
    bool follows = false;
  };
  // The results of a step, which the device writes.
  struct StepResults {
    explicit StepResults(DeviceType device)
        : loss_and_norm(device), begin(device), end(device), passes(device) {}

    Readback loss_and_norm;
    DeviceEvent begin;  // of a step that does not follow another
    DeviceEvent end;
    PassTimes passes;  // of a pipeline
  };

  StepResults& ResultsOf(int64_t step) { return *results_[step % results_.size()]; }
  // Runs micro-batches [first, first + count), whose numbers count from the begin of the run. Their
  // loss over all ranks, [1] float64, is on its way when it returns. The loss is a mean over all
  // targets of these micro-batches.
  absl::Status ForwardBackward(int64_t first, int64_t count, const Tensor& loss);
  absl::Status ForwardBackwardOne(int64_t micro_batch, double loss_scale, const Tensor& loss,
                                  bool first, bool last);
  absl::Status ForwardBackwardInPipeline(int64_t first, int64_t count, double loss_scale,
                                         const Tensor& loss);
  // This rank's part of a micro-batch, and where its dropout is drawn.
  absl::StatusOr<Pipeline::MicroBatch> MicroBatch(int64_t number);
  // AdamW, and what the ranks exchange after it.
  absl::Status Update(const Tensor& loss_and_norm, double lr);
  // StepMetrics::pipeline_bubble. Waits until the device has ended the passes. Collective.
  absl::StatusOr<double> PipelineBubbleOf(const PassTimes& passes);

  RankState& rank_;
  const ResolvedConfig& config_;
  LocalBatches& batches_;
  const SequenceSampler data_;
  const std::function<void()> before_update_;
  std::optional<GlobalBatch> sequences_;                 // of the last micro-batch
  std::deque<EnqueuedStep> enqueued_;                    // at most two
  std::array<std::unique_ptr<StepResults>, 3> results_;  // by step: those two, and the one before
};

}  // namespace burst
