#include "train/trainer/local_batches.h"

#include <algorithm>

#include "burst/base/status.h"

namespace burst {

std::pair<int64_t, int64_t> LocalBatches::Share(int64_t count) const {
  const ResolvedConfig& config = rank_.config;
  const int64_t groups = config.mesh.data;
  const int64_t group = config.mesh.data_rank(rank_.comm->rank());
  // In an exact run a group has whole chunks, of which the last one may be shorter.
  const int64_t rows = config.exact ? std::max<int64_t>(1, config.exact_chunk / config.seqlen) : 1;
  const int64_t chunks = (count + rows - 1) / rows;
  const auto begin = [&](int64_t g) { return std::min(count, chunks * g / groups * rows); };
  return {begin(group), begin(group + 1)};
}

absl::StatusOr<SequenceBatch> LocalBatches::PartOf(const GlobalBatch& sequences) {
  const ResolvedConfig& config = rank_.config;
  BURST_RETURN_IF_ERROR(CheckTokens(sequences, config.model.vocab));
  if (schedule_ == nullptr || config.packed) {
    BURST_ASSIGN_OR_RETURN(
        AttentionSchedule schedule,
        rank_.attention->Schedule(sequences.seqlen,
                                  config.AttentionMask().WithDocuments(sequences.documents)));
    schedule_ = std::make_shared<const AttentionSchedule>(std::move(schedule));
  }
  return SliceForRank(sequences, schedule_, config.device);
}

}  // namespace burst
