// Gives this rank's part of the batches of a run.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "model/transformer.h"
#include "train/data/batch.h"
#include "train/trainer/rank_state.h"

namespace burst {

class LocalBatches {
 public:
  // `rank` must outlive the object.
  explicit LocalBatches(const RankState& rank) : rank_(rank) {}

  // Returns the share of this rank's group of `count` sequences: [first, second). It may be empty.
  std::pair<int64_t, int64_t> Share(int64_t count) const;

  // Returns this rank's tokens of its group's sequences, on its device. InvalidArgument means that
  // a token is not in the vocabulary.
  absl::StatusOr<SequenceBatch> PartOf(const GlobalBatch& sequences);

 private:
  const RankState& rank_;
  std::shared_ptr<const AttentionSchedule> schedule_;  // for every batch, unless packed
};

}  // namespace burst
