#include "train/trainer/evaluator.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/autograd/tape.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"

namespace burst {

Evaluator::Evaluator(RankState* rank, LocalBatches* batches, SequenceSampler data,
                     StopAgreement* stop)
    : rank_(*rank), batches_(*batches), data_(std::move(data)), stop_(*stop) {}

int64_t Evaluator::sequences() const {
  const ResolvedConfig& config = rank_.config;
  const int64_t all = data_.max_evaluation();
  // The comparison counts batches, because the number of their sequences may need more than 64
  // bits.
  const bool some = config.eval_batches > 0 && config.eval_batches <= (all - 1) / config.batch;
  return some ? config.eval_batches * config.batch : all;
}

absl::Status Evaluator::CheckTargets() const {
  const int64_t total = sequences();
  for (int64_t i = 0; i < total; ++i) {
    BURST_ASSIGN_OR_RETURN(const GlobalBatch sequence, data_.Evaluation(i, 1, total));
    if (sequence.num_targets > 0) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--eval_batches: the evaluated sequences must have a token that counts in the loss; got ",
      total, " without one; give a larger number, a longer --seqlen or --eval_every=0"));
}

absl::StatusOr<std::optional<double>> Evaluator::MeanLoss() {
  const ScopedPhase phase("evaluation");
  const ResolvedConfig& config = rank_.config;
  const int64_t total = sequences();
  const Tensor sums = Tensor::Zeros({2}, DType::kFloat64, config.device);
  const Tensor sum = sums.Slice(0, 0, 1), targets = sums.Slice(0, 1, 1);
  int64_t num_targets = 0;
  for (int64_t first = 0; first < total; first += config.batch) {
    BURST_RETURN_IF_ERROR(stop_.Agree());
    if (stop_.stops()) return std::optional<double>();
    const auto [begin, end] = batches_.Share(std::min(config.batch, total - first));
    const bool idle = begin == end;         // fewer sequences than groups are left
    if (idle && config.zero < 3) continue;  // with ZeRO-3 the rank sends its part of the parameters
    BURST_ASSIGN_OR_RETURN(const GlobalBatch batch,
                           idle ? data_.Evaluation(first, 1, total)
                                : data_.Evaluation(first + begin, end - begin, total));
    BURST_RETURN_IF_ERROR(CheckTokens(batch, config.model.vocab));
    BURST_ASSIGN_OR_RETURN(const SequenceBatch local, batches_.PartOf(batch));
    BURST_ASSIGN_OR_RETURN(const Tensor loss, LossOf(local));
    if (idle) continue;
    if (!loss.null()) sum.Add(loss.View({1}).To(DType::kFloat64));
    num_targets += batch.num_targets;
  }
  // The first rank of a data-parallel group counts for the group.
  const Mesh& mesh = config.mesh;
  if (rank_.comm->rank() % (mesh.world_size() / mesh.data) == 0) {
    targets.Fill(static_cast<double>(num_targets));
  }
  BURST_RETURN_IF_ERROR(rank_.comm->AllReduceSum(sums));
  const std::vector<double> results = sums.ToVector<double>();
  return std::optional<double>(results[0] / results[1]);
}

absl::StatusOr<std::optional<double>> Evaluator::MeanLossOfAverage() {
  ParameterList& parameters = rank_.model->parameters();
  const Tensor weights = parameters.ExchangeValues(parameters.EmptyValues());
  const absl::Status taken = TakeAverage();
  const absl::StatusOr<std::optional<double>> loss =
      taken.ok() ? MeanLoss() : absl::StatusOr<std::optional<double>>(taken);
  parameters.ExchangeValues(weights);
  return loss;
}

absl::Status Evaluator::TakeAverage() {
  const ParameterList& parameters = rank_.model->parameters();
  for (int i = 0; i < static_cast<int>(parameters.units().size()); ++i) {
    const ParameterUnit& unit = parameters.units()[i];
    parameters.ValuePiece(i).ConvertFrom(
        rank_.optimizer->average().Slice(0, unit.shard_begin, unit.piece));
  }
  return rank_.exchange->GatherValues();
}

absl::StatusOr<Tensor> Evaluator::LossOf(const SequenceBatch& batch) {
  if (rank_.pipeline != nullptr) {
    return rank_.pipeline->Loss(*rank_.model, *rank_.attention, batch);
  }
  Tape tape(/*recording=*/false);
  const Variable loss = rank_.model->Loss(tape, *rank_.attention, batch, /*terms=*/1, DropoutKey());
  BURST_RETURN_IF_ERROR(tape.status());
  return loss.value();
}

}  // namespace burst
