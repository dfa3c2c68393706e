// Computes the mean loss of a model over the validation data.
#pragma once

#include <optional>

#include "absl/status/statusor.h"
#include "burst/tensor/tensor.h"
#include "train/data/batch.h"
#include "train/trainer/rank_state.h"
#include "train/trainer/run_saver.h"

namespace burst {

class Evaluator {
 public:
  // All arguments must outlive the object.
  Evaluator(RankState* rank, LocalBatches* batches, SequenceSampler data, StopAgreement* stop);

  // Returns InvalidArgument if no token of the evaluated sequences counts in the loss.
  absl::Status CheckTargets() const;
  // Returns the mean loss per target, or none if the ranks stop. Collective.
  absl::StatusOr<std::optional<double>> MeanLoss();
  // Returns the loss of the average of the weights (--ema). The weights and the state of the
  // optimizer stay as they are. Takes memory for the values once more.
  absl::StatusOr<std::optional<double>> MeanLossOfAverage();

 private:
  // Returns the number of sequences that an evaluation reads.
  int64_t sequences() const;
  // Copies the average into the values of all ranks with the same parameters.
  absl::Status TakeAverage();
  // Returns the loss of this rank's tokens, without a gradient; null on a stage that does not
  // compute it.
  absl::StatusOr<Tensor> LossOf(const SequenceBatch& batch);

  RankState& rank_;
  LocalBatches& batches_;
  const SequenceSampler data_;
  StopAgreement& stop_;
};

}  // namespace burst
