// What the trainer does between steps and at the end: evaluations, whether a run can continue from
// its model and is saved, the sample.
#include <algorithm>
#include <cmath>

#include "burst/autograd/tape.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/process.h"
#include "burst/device/device.h"
#include "train/checkpoint/checkpoint.h"
#include "train/generate/generate.h"
#include "train/trainer.h"

namespace burst {
namespace {

bool AllFinite(const Tensor& numbers) {
  const std::vector<double> values = numbers.ToVector<double>();
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

}  // namespace

absl::StatusOr<std::optional<double>> Trainer::Evaluate() {
  const ScopedPhase phase("evaluation");
  const int64_t all = validation_data_->max_evaluation();
  // Batches are counted, not their sequences, whose number may be beyond 64 bits.
  const bool some = config_.eval_batches > 0 && config_.eval_batches < all / config_.batch;
  const int64_t total = some ? config_.eval_batches * config_.batch : all;
  const Tensor sums = Tensor::Zeros({2}, DType::kFloat64, model_->device());
  const Tensor sum = sums.Slice(0, 0, 1), targets = sums.Slice(0, 1, 1);
  int64_t num_targets = 0;
  for (int64_t first = 0; first < total; first += config_.batch) {
    BURST_RETURN_IF_ERROR(AnyRankStops());
    if (stop_) return std::optional<double>();
    const auto [begin, end] = Share(std::min(config_.batch, total - first));
    const bool idle = begin == end;          // fewer sequences than groups
    if (idle && config_.zero < 3) continue;  // else it sends its part of the parameters
    BURST_ASSIGN_OR_RETURN(const GlobalBatch batch,
                           idle ? validation_data_->Evaluation(first, 1, total)
                                : validation_data_->Evaluation(first + begin, end - begin, total));
    BURST_RETURN_IF_ERROR(CheckTokens(batch, config_.model.vocab));
    BURST_ASSIGN_OR_RETURN(const SequenceBatch local, LocalBatch(batch));
    BURST_ASSIGN_OR_RETURN(const Tensor loss, LossOf(local));
    if (idle) continue;
    if (!loss.null()) sum.Add(loss.View({1}).To(DType::kFloat64));
    num_targets += batch.num_targets;
  }
  // The first rank of a data-parallel group counts for it.
  const Mesh& mesh = config_.mesh;
  if (comm_->rank() % (mesh.world_size() / mesh.data) == 0) {
    targets.Fill(static_cast<double>(num_targets));
  }
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sums));
  const std::vector<double> results = sums.ToVector<double>();
  return std::optional<double>(results[0] / std::max(1.0, results[1]));
}

absl::StatusOr<Tensor> Trainer::LossOf(const SequenceBatch& batch) {
  if (pipeline_ != nullptr) return pipeline_->Loss(*model_, *attention_, batch);
  Tape tape(/*recording=*/false);
  const Variable loss = model_->Loss(tape, *attention_, batch, /*loss_scale=*/1, DropoutKey());
  BURST_RETURN_IF_ERROR(tape.status());
  return loss.value();
}

// Without memory of the pool, whose lock another thread may have held at the fork.
bool Trainer::WeightsAreFinite() const {
  const Tensor masters = model_->parameters().masters();
  const auto* first = static_cast<const float*>(masters.raw_data());
  return std::all_of(first, first + masters.numel(), [](float x) { return std::isfinite(x); });
}

// With tensor parallelism and --zero several ranks have a part each of what is saved, they need one
// another for a set, and the state of a GPU is not in the host's memory: such runs need as much
// time as they take.
std::unique_ptr<SnapshotOnSignal> Trainer::MakeSnapshot() {
  if (report_ == nullptr || config_.comm == CommKind::kThreads || tensor_ != nullptr ||
      shards_ != nullptr || config_.checkpoint_sets || model_->device() != DeviceType::kCpu) {
    return nullptr;
  }
  return std::make_unique<SnapshotOnSignal>(
      [this] {
        // By itself a rank cannot make sure of more; older checkpoints stay.
        const bool good = skipped_ == 0 && WeightsAreFinite();
        return good && step_ > saver_->saved_step() ? saver_->SaveForked(step_, last_val_loss_)
                                                    : absl::OkStatus();
      },
      [this] { return saver_->busy(); });
}

// Whether a run can continue from the model as it is: its last step was finite, and so are all
// ranks' weights and optimizer states, and the loss and gradient of the next micro-batch. For an
// update may leave weights that are finite, but so large that nothing computed with them is; no
// step has seen them yet. Collective, the same on every rank; the gradients are not kept.
absl::StatusOr<bool> Trainer::IsSound(const StepMetrics& last) {
  if (last.skipped) return false;
  const bool state_is_finite = StateIsFinite();
  if (config_.zero < 2) model_->parameters().ZeroGrad();
  const Tensor results = Tensor::Empty({2}, DType::kFloat64, model_->device());
  const Tensor loss = results.Slice(0, 0, 1), norm = results.Slice(0, 1, 1);
  const int64_t micro_batch = step_ * config_.accumulate;
  BURST_ASSIGN_OR_RETURN(
      const int64_t num_targets,
      training_data_->TrainingTargets(micro_batch * config_.batch, config_.batch));
  const double loss_scale = 1.0 / static_cast<double>(std::max<int64_t>(1, num_targets));
  BURST_RETURN_IF_ERROR(ForwardBackward(micro_batch, /*count=*/1, loss_scale, loss));
  BURST_RETURN_IF_ERROR(FinishGradients(norm));
  BURST_RETURN_IF_ERROR(comm_->Barrier());  // as in AnyRankStops: all have enqueued it
  const bool sound = state_is_finite && AllFinite(results);
  BURST_ASSIGN_OR_RETURN(const bool ruined, OnAnyRank(!sound));
  return !ruined;
}

// Of this rank: its weights and optimizer state.
bool Trainer::StateIsFinite() const {
  const ParameterList& parameters = model_->parameters();
  std::vector<Tensor> state = {optimizer_->first_moment(), optimizer_->second_moment()};
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    state.push_back(parameters.MasterPiece(static_cast<int>(unit)));
  }
  const auto count = static_cast<int64_t>(state.size());
  SynchronizeDevice(model_->device());  // what is in the host's memory is there then
  const Tensor norms = Tensor::Zeros({count}, DType::kFloat64, model_->device());
  const Tensor on_host = Tensor::Zeros({count}, DType::kFloat64);
  for (int64_t i = 0; i < count; ++i) {
    const bool here = state[i].device() == DeviceType::kCpu;
    L2Norm(state[i], (here ? on_host : norms).Slice(0, i, 1));
  }
  return AllFinite(norms) && AllFinite(on_host);
}

// Begins to save the model after step `last`, with which nothing is enqueued. False, and nothing
// changes, if it is not sound.
absl::StatusOr<bool> Trainer::Checkpoint(const StepMetrics& last) {
  const ScopedPhase phase("save");
  BURST_ASSIGN_OR_RETURN(const bool sound, IsSound(last));
  if (!sound) return false;
  BURST_RETURN_IF_ERROR(saver_->Save(step_, last.val_loss));
  return true;
}

absl::StatusOr<std::string> Trainer::Sample() const {
  const ScopedPhase phase("sample");
  if (setup_.sample == 0 || !report_->prints()) return std::string();
  const Transformer* model = model_.get();
  std::unique_ptr<Transformer> whole;
  if (tensor_ != nullptr || pipeline_ != nullptr ||
      config_.zero == 3) {  // this rank owns a part of the model only
    BURST_ASSIGN_OR_RETURN(
        whole, Transformer::Create(config_.model, config_.dtype, /*seed=*/std::nullopt,
                                   config_.device, /*parallel=*/{}, StateSharding::ValuesAlone()));
    BURST_RETURN_IF_ERROR(
        LoadCheckpoint(report_->folder().checkpoint(), &whole->parameters(), nullptr));
    model = whole.get();
  }
  const Tokenizer& tokenizer = *setup_.data.tokenizer;
  GenerationOptions generation;
  generation.sampling.seed = static_cast<uint64_t>(config_.seed);
  generation.tokens = setup_.sample;
  generation.context = config_.seqlen;
  generation.window = config_.window;
  // A run that is complete does not fail at what its model's files say.
  const PromptRules rules =
      RulesOfCheckpoint(report_->folder().checkpoint(), tokenizer, /*with_begin=*/true)
          .value_or(PromptRules());
  generation.ends = rules.ends;
  BURST_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, EncodePrompt(tokenizer, "", rules));
  const auto beyond = [&](int32_t token) { return token >= config_.model.vocab; };
  if (std::any_of(prompt.begin(), prompt.end(), beyond)) prompt = {0};
  std::string text;
  BURST_RETURN_IF_ERROR(
      Generate(*model, tokenizer, prompt, generation, [&](absl::string_view piece) {
        absl::StrAppend(&text, piece);
        return InterruptSignal() == 0;
      }));
  return text;
}

}  // namespace burst
