#include "train/evaluate/scorer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {

GlobalBatch BatchOf(const std::vector<std::vector<int32_t>>& sequences, int64_t from) {
  GlobalBatch batch;
  batch.batch = static_cast<int64_t>(sequences.size());
  batch.seqlen = static_cast<int64_t>(sequences[0].size()) - 1;
  BURST_CHECK_GE(batch.seqlen, 1);
  for (const std::vector<int32_t>& tokens : sequences) {
    BURST_CHECK_EQ(static_cast<int64_t>(tokens.size()), batch.seqlen + 1);
    for (int64_t i = 0; i < batch.seqlen; ++i) {
      const bool counts = i + 1 >= from;
      batch.tokens.push_back(tokens[i]);
      batch.positions.push_back(static_cast<int32_t>(i));
      batch.targets.push_back(counts ? tokens[i + 1] : -1);
      batch.num_targets += counts ? 1 : 0;
    }
  }
  return batch;
}

absl::StatusOr<std::unique_ptr<Scorer>> Scorer::Create(const ModelOptions& options,
                                                       const ModelSource& source,
                                                       const Place& place, Communicator* comm) {
  std::unique_ptr<Scorer> scorer(new Scorer(source, comm));
  BURST_ASSIGN_OR_RETURN(scorer->model_, source.Load(place));
  BURST_ASSIGN_OR_RETURN(scorer->attention_, AttentionOver(options, source, comm));
  return scorer;
}

absl::StatusOr<std::vector<Transformer::TargetScore>> Scorer::Score(const GlobalBatch& batch) {
  BURST_RETURN_IF_ERROR(CheckTokens(batch, source_.model.vocab));
  if (source_.model.family == Family::kGpt2 && batch.seqlen > source_.context) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequences must have at most the ", source_.context,
                     " tokens whose positions the model has learned; got ", batch.seqlen));
  }
  if (schedules_.windowed == nullptr || schedules_.shard().seqlen() != batch.seqlen) {
    BURST_ASSIGN_OR_RETURN(schedules_,
                           MakeLayerSchedules(model_->config(), *attention_, batch.seqlen,
                                              Mask::SlidingWindow(source_.window)));
  }
  const SequenceBatch local = SliceForRank(batch, schedules_, model_->device());
  BURST_ASSIGN_OR_RETURN(const std::vector<Transformer::TargetScore> own,
                         model_->ScoreTargets(*attention_, local));
  // Each rank adds the scores of its targets: [0] the losses, [1] whether they are the likeliest.
  const int64_t all = batch.batch * batch.seqlen;
  std::vector<double> sums(2 * all);
  size_t next = 0;
  for (int64_t row = 0; row < batch.batch; ++row) {
    for (const int32_t position : schedules_.shard().local_positions()) {
      const int64_t i = row * batch.seqlen + position;
      if (batch.targets[i] < 0) continue;
      sums[i] = own[next].loss;
      sums[all + i] = own[next].likeliest ? 1 : 0;
      ++next;
    }
  }
  BURST_CHECK_EQ(next, own.size());
  const Tensor tensor = Tensor::FromVector(sums, {2 * all}).To(model_->device());
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(tensor));
  sums = tensor.ToVector<double>();
  std::vector<Transformer::TargetScore> scores(all);
  for (int64_t i = 0; i < all; ++i) scores[i] = {sums[i], sums[all + i] == 1};
  return scores;
}

}  // namespace burst
