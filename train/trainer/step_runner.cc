#include "train/trainer/step_runner.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/comm/message_time.h"
#include "burst/device/device.h"

namespace burst {

StepRunner::StepRunner(RankState* rank, LocalBatches* batches, SequenceSampler data,
                       std::function<void()> before_update)
    : rank_(*rank),
      config_(rank->config),
      batches_(*batches),
      data_(std::move(data)),
      before_update_(std::move(before_update)) {
  for (auto& results : results_) results = std::make_unique<StepResults>(config_.device);
}

std::optional<int64_t> StepRunner::first_enqueued() const {
  return enqueued_.empty() ? std::nullopt : std::optional<int64_t>(enqueued_.front().step);
}

//   loss = 1/n sum over ranks, micro-batches and targets of -log p(target),   n: all of the targets
//   g = d loss / d parameters, scaled to a norm of at most clip;  AdamW(g)
//
// The host does not wait here. Complete waits for the step's results.
absl::Status StepRunner::Enqueue(int64_t step, bool follows) {
  ReachStep(step + 1);
  enqueued_.push_back({step, config_.lr(step), follows});
  StepResults& results = ResultsOf(step);
  if (!follows) results.begin.Record();
  results.waits.Clear();
  const ScopedStreamWaits measured(&results.waits);
  const double message_seconds = ScopedMessageTime::Seconds();

  const Tensor loss_and_norm = Tensor::Empty({2}, DType::kFloat64, config_.device);
  const Tensor loss = loss_and_norm.Slice(0, 0, 1), norm = loss_and_norm.Slice(0, 1, 1);
  BURST_ASSIGN_OR_RETURN(const int64_t targets,
                         ForwardBackward(step * config_.accumulate, config_.accumulate, loss));
  enqueued_.back().counts = targets > 0;

  const ScopedPhase update("update");
  // The last backward has enqueued most of the reduction over ranks.
  BURST_RETURN_IF_ERROR(rank_.FinishGradients(norm));
  before_update_();
  BURST_RETURN_IF_ERROR(Update(loss_and_norm, enqueued_.back().lr));

  results.loss_and_norm.Post(loss_and_norm.raw_data(), loss_and_norm.size_bytes());
  results.end.Record();
  results.message_seconds = ScopedMessageTime::Seconds() - message_seconds;
  return absl::OkStatus();
}

absl::StatusOr<StepMetrics> StepRunner::Complete() {
  const EnqueuedStep done = enqueued_.front();
  enqueued_.pop_front();
  const StepResults& own = ResultsOf(done.step);
  ReachStep(done.step + 1);
  const ScopedPhase phase("results");
  std::optional<ScopedWait> wait(std::in_place, "waits for the device to end the step");
  const auto* loss_and_norm = static_cast<const double*>(own.loss_and_norm.Wait());
  StepMetrics metrics;
  metrics.lr = done.lr;
  metrics.loss = loss_and_norm[0];
  metrics.grad_norm = loss_and_norm[1];
  metrics.skipped = !std::isfinite(metrics.loss) || !std::isfinite(metrics.grad_norm);
  if (!done.counts) metrics.loss = std::nan("");  // a mean over no targets

  const double seconds =
      own.end.SecondsSince(done.follows ? ResultsOf(done.step - 1).end : own.begin);
  wait.reset();
  metrics.step = done.step + 1;
  metrics.tokens = metrics.step * rank_.step_tokens();
  metrics.tokens_per_second = static_cast<double>(rank_.step_tokens()) / seconds;
  metrics.step_ms = 1e3 * seconds;
  BURST_RETURN_IF_ERROR(SetTimesOfRanks(own, &metrics));
  return metrics;
}

absl::StatusOr<bool> StepRunner::CanContinue(int64_t steps) {
  const bool state_is_finite = rank_.IsFinite();
  const Tensor results = Tensor::Empty({2}, DType::kFloat64, config_.device);
  const Tensor loss = results.Slice(0, 0, 1), norm = results.Slice(0, 1, 1);
  BURST_RETURN_IF_ERROR(ForwardBackward(steps * config_.accumulate, /*count=*/1, loss).status());
  BURST_RETURN_IF_ERROR(rank_.FinishGradients(norm));
  BURST_RETURN_IF_ERROR(rank_.comm->Barrier());  // all ranks enqueue before one waits for its GPU
  const std::vector<double> values = results.ToVector<double>();
  const bool is_finite = state_is_finite && std::isfinite(values[0]) && std::isfinite(values[1]);
  BURST_ASSIGN_OR_RETURN(const bool ruined, rank_.OnAnyRank(!is_finite));
  return !ruined;
}

absl::StatusOr<int64_t> StepRunner::ForwardBackward(int64_t first, int64_t count,
                                                    const Tensor& loss) {
  rank_.exchange->BeginStep();
  BURST_ASSIGN_OR_RETURN(const int64_t num_targets,
                         data_.TrainingTargets(first * config_.batch, count * config_.batch));
  const LossTerms terms(1.0 / static_cast<double>(std::max<int64_t>(1, num_targets)),
                        config_.z_loss);
  if (rank_.pipeline != nullptr) {
    BURST_RETURN_IF_ERROR(ForwardBackwardInPipeline(first, count, terms, loss));
    return num_targets;
  }
  for (int64_t i = first; i < first + count; ++i) {
    BURST_RETURN_IF_ERROR(ForwardBackwardOne(i, terms, loss, i == first, i + 1 == first + count));
  }
  return num_targets;
}

// Forward and backward of a micro-batch. This rank's part of its loss goes into `loss`, and its
// part of the gradients is added to what is there. `first` and `last`: whether it is the first or
// the last of the micro-batches that are accumulated. In the last one, the reduction of loss and
// gradients over ranks is enqueued as soon as they are complete, while the backward goes on.
absl::Status StepRunner::ForwardBackwardOne(int64_t micro_batch, const LossTerms& terms,
                                            const Tensor& loss, bool first, bool last) {
  BURST_ASSIGN_OR_RETURN(const MicroBatch own, MakeMicroBatch(micro_batch));
  std::optional<ScopedPhase> phase(std::in_place, "forward");
  Tape tape;
  const GradientsReady ready = [&](int begin, int end) {
    const absl::Status status = rank_.exchange->Post(begin, end);
    if (!status.ok()) tape.Fail(status);
  };
  const Variable part = rank_.model->Loss(tape, *rank_.attention, own.batch, terms, own.dropout,
                                          last ? ready : nullptr);
  BURST_RETURN_IF_ERROR(tape.status());
  if (first) {
    loss.ConvertFrom(part.value().View({1}));
  } else {
    loss.Add(part.value().View({1}).To(DType::kFloat64));
  }
  if (last) BURST_RETURN_IF_ERROR(rank_.comm->PostAllReduceSum(loss));
  phase.reset();
  phase.emplace("backward");
  return tape.Backward(part);
}

// The reductions begin when all gradients are complete, because the order of completion depends on
// the stage.
absl::Status StepRunner::ForwardBackwardInPipeline(int64_t first, int64_t count,
                                                   const LossTerms& terms, const Tensor& loss) {
  const int64_t step = first / config_.accumulate;  // the step's number, or CanContinue's next step
  BURST_RETURN_IF_ERROR(rank_.pipeline->ForwardBackward(
      *rank_.model, *rank_.attention, static_cast<int>(count),
      [&](int number) { return MakeMicroBatch(first + number); }, terms, loss,
      &ResultsOf(step).passes));
  BURST_RETURN_IF_ERROR(rank_.comm->PostAllReduceSum(loss));
  return rank_.exchange->Post(0, rank_.model->parameters().size());
}

absl::StatusOr<MicroBatch> StepRunner::MakeMicroBatch(int64_t number) {
  const auto [begin, end] = batches_.Share(config_.batch);
  const int64_t first = number * config_.batch + begin, count = end - begin;
  std::shared_ptr<const GlobalBatch> sequences;
  if (rank_.setup.simulated != nullptr && !config_.packed) {
    BURST_ASSIGN_OR_RETURN(sequences, rank_.setup.simulated->Training(data_, first, count));
  } else {
    BURST_ASSIGN_OR_RETURN(GlobalBatch read, data_.Training(first, count));
    BURST_RETURN_IF_ERROR(CheckTokens(read, config_.model.vocab));
    sequences = std::make_shared<const GlobalBatch>(std::move(read));
  }
  BURST_ASSIGN_OR_RETURN(SequenceBatch batch, batches_.PartOf(*sequences));
  const bool drops = config_.model.dropout > 0 || config_.model.attention_dropout > 0;
  const DropoutKey dropout{static_cast<uint64_t>(config_.seed), static_cast<uint64_t>(number),
                           drops, begin};
  return MicroBatch{std::move(batch), dropout};
}

absl::Status StepRunner::Update(const Tensor& loss_and_norm, double lr) {
  ReachOp(/*layer=*/-1, "optimizer", /*on_device=*/true);
  const ParameterList& parameters = rank_.model->parameters();
  const bool rounds = parameters.dtype() != parameters.master_dtype();
  std::vector<AdamW::Part> parts;
  for (int unit = 0; unit < static_cast<int>(parameters.units().size()); ++unit) {
    parts.push_back({parameters.MasterPiece(unit), rounds ? parameters.ValuePiece(unit) : Tensor(),
                     parameters.GradPiece(unit)});
  }
  BURST_RETURN_IF_ERROR(rank_.optimizer->Step(parts, loss_and_norm, config_.clip, lr));
  return rank_.exchange->GatherValues();
}

// The first stage makes the very first and the very last pass, so its span covers every stage.
absl::Status StepRunner::SetTimesOfRanks(const StepResults& own, StepMetrics* metrics) {
  const int ranks = rank_.comm->world_size();
  const bool pipeline = rank_.pipeline != nullptr;
  const bool exposes = ranks > 1 && !rank_.setup.simulated;
  if (!pipeline && !exposes) return absl::OkStatus();
  const bool first = pipeline && rank_.pipeline->stage() == 0;
  const double exposed = config_.device == DeviceType::kCpu ? own.message_seconds
                         : own.waits.complete()             ? own.waits.Busy()
                                                            : std::nan("");
  const Tensor sums =
      Tensor::FromVector<double>({first ? config_.mesh.stages * own.passes.Span() : 0,
                                  pipeline ? own.passes.Busy() : 0, exposed},
                                 {3});
  BURST_RETURN_IF_ERROR(rank_.comm->AllReduceSum(sums));
  const auto* of_ranks = sums.data<double>();
  if (pipeline) metrics->pipeline_bubble = of_ranks[0] / of_ranks[1] - 1;
  if (exposes && !std::isnan(of_ranks[2])) metrics->exposed_ms = 1e3 * of_ranks[2] / ranks;
  return absl::OkStatus();
}

}  // namespace burst
