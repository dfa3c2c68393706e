// One step of the trainer: micro-batches, forward and backward, the reduction of gradients, the
// update, and the step's results.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "burst/autograd/tape.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/process.h"
#include "burst/device/device.h"
#include "burst/device/profiler.h"
#include "train/trainer.h"

namespace burst {

absl::StatusOr<StepMetrics> Trainer::Step(int64_t step, bool enqueue_next) {
  if (enqueued_.empty()) BURST_RETURN_IF_ERROR(Enqueue(step, follows_));
  BURST_CHECK_EQ(enqueued_.front().step, step) << "the call before was told of the next step";
  BURST_RETURN_IF_ERROR(AnyRankStops());
  follows_ = enqueue_next && !stop_;
  if (follows_ && model_->device() == DeviceType::kCuda) {
    BURST_RETURN_IF_ERROR(Enqueue(step + 1, /*follows=*/true));
  }
  return Complete();
}

//   loss = 1/n sum over ranks, micro-batches and targets of -log p(target),   n: all of the targets
//   g = d loss / d parameters, scaled to a norm of at most clip;  AdamW(g)
//
// The host waits for nothing: what it learns of the step, it learns in Complete.
absl::Status Trainer::Enqueue(int64_t step, bool follows) {
  ReachStep(step + 1);
  enqueued_.push_back({step, config_.lr(step), follows});
  StepResults& results = *results_[step % results_.size()];
  if (!follows) results.begin.Record();

  // Forward and backward; gradients accumulate over micro-batches.
  if (config_.zero < 2) model_->parameters().ZeroGrad();
  const int64_t micro_batches = config_.accumulate, first = step * micro_batches;
  BURST_ASSIGN_OR_RETURN(
      const int64_t num_targets,
      training_data_->TrainingTargets(first * config_.batch, micro_batches * config_.batch));
  const double loss_scale = 1.0 / static_cast<double>(std::max<int64_t>(1, num_targets));
  const Tensor loss_and_norm = Tensor::Empty({2}, DType::kFloat64, model_->device());
  const Tensor loss = loss_and_norm.Slice(0, 0, 1), norm = loss_and_norm.Slice(0, 1, 1);
  BURST_RETURN_IF_ERROR(ForwardBackward(first, micro_batches, loss_scale, loss));

  const ScopedPhase update("update");
  // Reduction over ranks, of which the last backward has enqueued most, and the gradient's norm.
  BURST_RETURN_IF_ERROR(FinishGradients(norm));
  if (snapshot_ != nullptr) snapshot_->BeginChange();
  saver_->BeforeUpdate();
  BURST_RETURN_IF_ERROR(Update(loss_and_norm, enqueued_.back().lr));

  results.loss_and_norm.Post(loss_and_norm.raw_data(), loss_and_norm.size_bytes());
  results.end.Record();
  return absl::OkStatus();
}

absl::Status Trainer::FinishGradients(const Tensor& norm) {
  BURST_RETURN_IF_ERROR(gradients_ != nullptr ? gradients_->Finish(norm) : shards_->Finish(norm));
  return comm_->Wait(Channel::kCollective);
}

absl::Status Trainer::Update(const Tensor& loss_and_norm, double lr) {
  ReachOp(/*layer=*/-1, "optimizer", /*on_device=*/true);
  const ParameterList& parameters = model_->parameters();
  const bool rounds = parameters.dtype() != parameters.master_dtype();
  std::vector<AdamW::Part> parts;
  for (int unit = 0; unit < static_cast<int>(parameters.units().size()); ++unit) {
    parts.push_back({parameters.MasterPiece(unit), rounds ? parameters.ValuePiece(unit) : Tensor(),
                     parameters.GradPiece(unit)});
  }
  optimizer_->Step(parts, loss_and_norm, config_.clip, lr);
  return shards_ == nullptr ? absl::OkStatus() : shards_->GatherValues();
}

absl::Status Trainer::ForwardBackward(int64_t first, int64_t count, double loss_scale,
                                      const Tensor& loss) {
  if (shards_ != nullptr) shards_->BeginStep();
  if (pipeline_ != nullptr) return ForwardBackwardInPipeline(first, count, loss_scale, loss);
  for (int64_t i = first; i < first + count; ++i) {
    BURST_RETURN_IF_ERROR(
        ForwardBackwardOne(i, loss_scale, loss, i == first, i + 1 == first + count));
  }
  return absl::OkStatus();
}

// The reductions begin when all gradients are complete: in which order they become so depends on
// the stage.
absl::Status Trainer::ForwardBackwardInPipeline(int64_t first, int64_t count, double loss_scale,
                                                const Tensor& loss) {
  const int64_t step = first / config_.accumulate;  // of a step, or of IsSound before it
  BURST_RETURN_IF_ERROR(pipeline_->ForwardBackward(
      *model_, *attention_, static_cast<int>(count),
      [&](int number) { return MicroBatch(first + number); }, loss_scale, loss,
      &results_[step % results_.size()]->passes));
  BURST_RETURN_IF_ERROR(comm_->PostAllReduceSum(loss));
  return gradients_ == nullptr ? absl::OkStatus()
                               : gradients_->Post(0, model_->parameters().size());
}

absl::StatusOr<Pipeline::MicroBatch> Trainer::MicroBatch(int64_t number) {
  const auto [begin, end] = Share(config_.batch);
  // To a plan all sequences are alike, but for their documents.
  if (!setup_.simulated || config_.packed || !sequences_.has_value()) {
    BURST_ASSIGN_OR_RETURN(sequences_,
                           training_data_->Training(number * config_.batch + begin, end - begin));
    BURST_RETURN_IF_ERROR(CheckTokens(*sequences_, config_.model.vocab));
  }
  BURST_ASSIGN_OR_RETURN(SequenceBatch batch, LocalBatch(*sequences_));
  const bool drops = config_.model.dropout > 0 || config_.model.attention_dropout > 0;
  const DropoutKey dropout{static_cast<uint64_t>(config_.seed), static_cast<uint64_t>(number),
                           drops, begin};
  return Pipeline::MicroBatch{std::move(batch), dropout};
}

// Forward and backward of a micro-batch, by its number in the run. This rank's part of its loss
// goes into `loss`, [1] float64, and its part of the gradients is added to what is there. `first`
// and `last`: whether it is the first or the last of the micro-batches that are accumulated. In the
// last one, the reduction of loss and gradients over ranks is enqueued as soon as they are
// complete, while the backward goes on.
absl::Status Trainer::ForwardBackwardOne(int64_t micro_batch, double loss_scale, const Tensor& loss,
                                         bool first, bool last) {
  BURST_ASSIGN_OR_RETURN(const Pipeline::MicroBatch own, MicroBatch(micro_batch));
  std::optional<ScopedPhase> phase(std::in_place, "forward");
  Tape tape;
  const GradientsReady ready = [&](int first, int last) {
    const absl::Status status = gradients_->Post(first, last);
    if (!status.ok()) tape.Fail(status);
  };
  const bool posts = last && gradients_ != nullptr;
  const Variable part =
      model_->Loss(tape, *attention_, own.batch, loss_scale, own.dropout, posts ? ready : nullptr);
  BURST_RETURN_IF_ERROR(tape.status());
  if (first) {
    loss.ConvertFrom(part.value().View({1}));
  } else {
    loss.Add(part.value().View({1}).To(DType::kFloat64));
  }
  if (last) BURST_RETURN_IF_ERROR(comm_->PostAllReduceSum(loss));
  phase.reset();
  phase.emplace("backward");
  return tape.Backward(part);
}

// All ranks stop after the same step. And none waits for its GPU's part in a step before all have
// enqueued that.
absl::Status Trainer::AnyRankStops() {
  const ScopedPhase phase("agreement whether to stop");
  const Tensor sums = Tensor::FromVector<double>(
      {InterruptSignal() != 0 ? 1.0 : 0.0, saver_->busy() ? 1.0 : 0.0}, {2});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sums));
  stop_ = stop_ || sums.data<double>()[0] > 0;
  // All ranks know of a set, or none.
  if (saver_->has_set() && sums.data<double>()[1] == 0) return saver_->CompleteSet();
  return absl::OkStatus();
}

absl::StatusOr<bool> Trainer::OnAnyRank(bool condition) {
  const Tensor sum = Tensor::FromVector<double>({condition ? 1.0 : 0.0}, {1});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sum));
  return sum.data<double>()[0] > 0;
}

// The first stage makes the first pass of all and the last one, so its span covers every stage.
absl::StatusOr<double> Trainer::PipelineBubbleOf(const PassTimes& passes) {
  const double span = pipeline_->stage() == 0 ? config_.mesh.stages * passes.Span() : 0;
  const Tensor sums = Tensor::FromVector<double>({span, passes.Busy()}, {2});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sums));
  return sums.data<double>()[0] / sums.data<double>()[1] - 1;
}

// The results of the step that was enqueued first.
absl::StatusOr<StepMetrics> Trainer::Complete() {
  const EnqueuedStep done = enqueued_.front();
  enqueued_.pop_front();
  const auto results = [&](int64_t step) -> const StepResults& {
    return *results_[step % results_.size()];
  };
  const StepResults& own = results(done.step);
  ReachStep(done.step + 1);
  const ScopedPhase phase("results");
  std::optional<ScopedWait> wait(std::in_place, "waits for the device to end the step");
  const auto* loss_and_norm = static_cast<const double*>(own.loss_and_norm.Wait());
  StepMetrics metrics;
  metrics.lr = done.lr;
  metrics.loss = loss_and_norm[0];
  metrics.grad_norm = loss_and_norm[1];
  metrics.skipped = !std::isfinite(metrics.loss) || !std::isfinite(metrics.grad_norm);

  const double seconds =
      own.end.SecondsSince(done.follows ? results(done.step - 1).end : own.begin);
  wait.reset();
  metrics.step = done.step + 1;
  metrics.tokens = metrics.step * step_tokens();
  metrics.tokens_per_second = static_cast<double>(step_tokens()) / seconds;
  metrics.step_ms = 1e3 * seconds;
  if (pipeline_ != nullptr) {
    BURST_ASSIGN_OR_RETURN(metrics.pipeline_bubble, PipelineBubbleOf(own.passes));
  }
  return metrics;
}

std::pair<int64_t, int64_t> Trainer::Share(int64_t count) const {
  const int64_t groups = config_.mesh.data;
  // In an exact run a group has whole chunks, of which the last one may be shorter.
  const int64_t rows =
      config_.exact ? std::max<int64_t>(1, config_.exact_chunk / config_.seqlen) : 1;
  const int64_t chunks = (count + rows - 1) / rows;
  const auto begin = [&](int64_t group) { return std::min(count, chunks * group / groups * rows); };
  return {begin(data_rank_), begin(data_rank_ + 1)};
}

absl::StatusOr<SequenceBatch> Trainer::LocalBatch(const GlobalBatch& batch) {
  if (schedule_ == nullptr || config_.packed) {
    BURST_ASSIGN_OR_RETURN(
        AttentionSchedule schedule,
        attention_->Schedule(batch.seqlen, config_.AttentionMask().WithDocuments(batch.documents)));
    schedule_ = std::make_shared<const AttentionSchedule>(std::move(schedule));
  }
  return SliceForRank(batch, schedule_, model_->device());
}

}  // namespace burst
