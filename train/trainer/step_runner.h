// Runs the optimizer steps of one rank: micro-batches, forward and backward, the reduction of
// gradients, the update, and the step's results.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/device/device_spans.h"
#include "burst/device/event.h"
#include "burst/tensor/tensor.h"
#include "train/data/batch.h"
#include "train/pipeline/pipeline.h"
#include "train/report/metrics.h"
#include "train/trainer/rank_state.h"

namespace burst {

class StepRunner {
 public:
  // `rank` and `batches` must outlive the object. before_update is called before the state changes.
  StepRunner(RankState* rank, LocalBatches* batches, SequenceSampler data,
             std::function<void()> before_update);

  // Returns the number of sequences in an epoch.
  int64_t sequences_per_epoch() const { return data_.per_epoch(); }

  // Gives the device the work of step number `step`, from 0. At most two steps wait for Complete.
  // `follows` says that the step comes straight after the previous one. Collective.
  absl::Status Enqueue(int64_t step, bool follows);
  // Waits for the results of the step that was enqueued first. Collective. step_ms is time on the
  // device. It begins with the end of the previous step if this step follows it, else with this
  // step's begin.
  absl::StatusOr<StepMetrics> Complete();
  // Returns the number of the step that Complete would return; none if nothing is enqueued.
  std::optional<int64_t> first_enqueued() const;

  // Returns whether the weights and optimizer states of all ranks are finite. The loss and gradient
  // of the next micro-batch after `steps` steps must be finite, too. An update may leave finite
  // weights that are so large that results with them are not finite. The gradients are not kept.
  // Collective.
  absl::StatusOr<bool> CanContinue(int64_t steps);

 private:
  // A step whose work the device has.
  struct EnqueuedStep {
    int64_t step = 0;
    double lr = 0;
    bool follows = false;
    bool counts = true;  // some target of its sequences counts in the loss
  };
  // The most waits of a step that are measured. A step with more, such as one of very many
  // micro-batches, has no exposed_ms.
  static constexpr size_t kMostWaits = 4096;
  // The results of a step, which the device writes.
  struct StepResults {
    explicit StepResults(DeviceType device)
        : loss_and_norm(device),
          begin(device),
          end(device),
          passes(device),
          waits(device, kMostWaits) {}

    Readback loss_and_norm;
    DeviceEvent begin;  // for a step that does not follow another
    DeviceEvent end;
    DeviceSpans passes;          // only in a pipeline
    DeviceSpans waits;           // for messages, on a GPU
    double message_seconds = 0;  // of this rank's thread, within the step
  };

  StepResults& ResultsOf(int64_t step) { return *results_[step % results_.size()]; }
  // Runs micro-batches [first, first + count), whose numbers count from the begin of the run. The
  // device then computes their loss over all ranks, [1] float64: the mean over all targets of these
  // micro-batches. Returns the number of targets.
  absl::StatusOr<int64_t> ForwardBackward(int64_t first, int64_t count, const Tensor& loss);
  absl::Status ForwardBackwardOne(int64_t micro_batch, const LossTerms& terms, const Tensor& loss,
                                  bool first, bool last);
  absl::Status ForwardBackwardInPipeline(int64_t first, int64_t count, const LossTerms& terms,
                                         const Tensor& loss);
  // Returns this rank's part of a micro-batch, and the place of its dropout.
  absl::StatusOr<MicroBatch> MakeMicroBatch(int64_t number);
  // Updates by AdamW, and exchanges the results between ranks.
  absl::Status Update(const Tensor& loss_and_norm, double lr);
  // Sets the row's times that ranks measure apart, and waits until the device has ended the passes.
  // Collective.
  absl::Status SetTimesOfRanks(const StepResults& own, StepMetrics* metrics);

  RankState& rank_;
  const ResolvedConfig& config_;
  LocalBatches& batches_;
  const SequenceSampler data_;
  const std::function<void()> before_update_;
  std::deque<EnqueuedStep> enqueued_;                    // at most two
  std::array<std::unique_ptr<StepResults>, 3> results_;  // by step: those two, and the previous one
};

}  // namespace burst
