#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/strategy.h"
#include "burst/autograd/tape.h"
#include "burst/base/status.h"
#include "burst/comm/mesh.h"
#include "burst/device/memory.h"
#include "model/tensor_parallel.h"
#include "train/checkpoint/checkpoint.h"
#include "train/data/text.h"
#include "train/generate/generate.h"
#include "train/interrupt.h"
#include "train/report/console.h"
#include "train/report/peak_flops.h"
#include "train/report/run_folder.h"

namespace burst {
namespace {

constexpr int kMaxSkippedSteps = 5;

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::vector<DecayRange> DecayRanges(const ParameterList& parameters) {
  std::vector<DecayRange> ranges;
  for (const Parameter& p : parameters.all()) {
    if (p.decay) ranges.push_back({p.offset, p.offset + p.numel()});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const DecayRange& a, const DecayRange& b) { return a.begin < b.begin; });
  return ranges;
}

std::string Machine(const ResolvedConfig& config, int ranks, double peak_flops) {
  if (config.device == DeviceType::kCpu) {
    return absl::StrFormat("%d x %d threads, sgemm %.1f GFLOP/s measured: 100%% of MFU", ranks,
                           config.threads, peak_flops * 1e-9);
  }
  const char* precision = config.dtype == DType::kBFloat16 ? "bf16" : config.tf32 ? "tf32" : "fp32";
  return absl::StrFormat("%d x %s, %s products %.0f TFLOP/s measured: 100%% of MFU", ranks,
                         CudaDeviceName(0), precision, peak_flops * 1e-12);
}

std::string Ranks(const ResolvedConfig& config) {
  const Mesh& mesh = config.mesh;
  const char* kind = config.comm == CommKind::kMpi    ? "processes, MPI"
                     : config.comm == CommKind::kNccl ? "processes, NCCL"
                                                      : "threads";
  const bool tensor = IsTensorParallel(config.strategy);
  return absl::StrFormat("%d = %d data parallel x %d %s parallel; %s", config.ranks, mesh.data,
                         mesh.sequence, tensor ? "tensor" : "sequence", kind);
}

std::string StrategyText(const ResolvedConfig& config) {
  std::string text = Name(config.strategy);
  if (config.strategy == Strategy::kBurstUlysses) {
    absl::StrAppend(&text, " in groups of ", config.ulysses);
  }
  if (config.ranks_per_node > 0) {
    absl::StrAppend(&text, ", ", config.ranks_per_node, " ranks per node");
  }
  if (HasDirections(config.strategy))
    absl::StrAppend(&text, ", ", Name(config.backward), " backward");
  if (config.ring_grad_dtype != RingGradDType::kFp32) {
    absl::StrAppend(&text, ", ", Name(config.ring_grad_dtype), " gradients in transit");
  }
  return text;
}

}  // namespace

struct Trainer::Report {
  RunFolder folder;
  std::unique_ptr<Console> console;  // null: silent
};

Trainer::Trainer(const TrainingSetup& setup, Communicator* comm)
    : setup_(setup),
      config_(setup.config),
      comm_(comm),
      data_rank_(setup.config.mesh.data_rank(comm->rank())) {}

Trainer::~Trainer() = default;

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainingSetup& setup,
                                                         Communicator* comm, bool verbose) {
  std::unique_ptr<Trainer> trainer(new Trainer(setup, comm));
  BURST_RETURN_IF_ERROR(trainer->Init(verbose));
  return trainer;
}

absl::Status Trainer::Init(bool verbose) {
  const Mesh& mesh = config_.mesh;
  tensor_parallel_ = IsTensorParallel(config_.strategy) && mesh.sequence > 1;
  // The exchanges of tensor parallelism must not wait for gradients on their way: a communicator of
  // their own.
  if (mesh.sequence > 1 && (mesh.data > 1 || tensor_parallel_)) {
    BURST_ASSIGN_OR_RETURN(sequence_, SplitSequence(mesh, *comm_));
  }
  Communicator* const ring = sequence_ == nullptr && mesh.data == 1 ? comm_ : sequence_.get();
  BURST_ASSIGN_OR_RETURN(attention_, CreateAttention(config_.strategy, config_.AttentionOptions(),
                                                     config_.ulysses, ring));
  const DeviceType device = config_.device;
  TensorParallel parallel;
  if (tensor_parallel_) {
    parallel = TensorParallel(sequence_.get(), config_.strategy == Strategy::kTpSp);
  }
  BURST_ASSIGN_OR_RETURN(
      model_, Transformer::Create(config_.model, config_.dtype, static_cast<uint64_t>(config_.seed),
                                  device, parallel));
  model_->set_recompute(config_.recompute);
  ParameterList& parameters = model_->parameters();
  BURST_ASSIGN_OR_RETURN(
      gradients_,
      GradientSum::Create(parameters, comm_, tensor_parallel_ ? sequence_.get() : nullptr));
  optimizer_ = std::make_unique<AdamW>(
      AdamWOptions{config_.beta1, config_.beta2, config_.eps, config_.weight_decay},
      parameters.numel(), parameters.masters().dtype(), DecayRanges(parameters), device);

  for (auto& readback : readback_) readback = std::make_unique<Readback>(device);

  const Windows::Options windows{config_.seqlen, static_cast<uint64_t>(config_.seed),
                                 config_.packed};
  BURST_ASSIGN_OR_RETURN(windows_, Windows::Create(setup_.data.train, windows));
  if (config_.eval_every > 0) {
    BURST_ASSIGN_OR_RETURN(validation_windows_, Windows::Create(setup_.data.validation, windows));
  }
  if (setup_.resumed.has_value()) {
    BURST_RETURN_IF_ERROR(
        LoadCheckpoint(CheckpointPath(config_.out), &parameters, optimizer_.get()));
    step_ = setup_.resumed->step;
  }

  // The peak of all ranks at once, on the cores that the run will use.
  BURST_RETURN_IF_ERROR(comm_->Barrier());
  Tensor peak =
      Tensor::FromVector<double>({verbose ? MeasurePeakFlops(device, config_.dtype) : 0}, {1});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(peak));
  if (comm_->rank() == 0) return OpenReport(verbose, peak.data<double>()[0]);
  return absl::OkStatus();
}

absl::Status Trainer::Train() {
  const auto start = Clock::now();
  int skipped = 0;
  while (step_ < config_.steps && !stop_) {
    const int64_t steps = step_ + 1;
    // Unless something comes between, or this may be the step that ends the run.
    const bool enqueue_next =
        !EvaluatesAfter(steps) && !SavesAfter(steps) && skipped + 1 < kMaxSkippedSteps;
    BURST_ASSIGN_OR_RETURN(StepMetrics metrics, Step(step_, enqueue_next));
    step_ = steps;
    skipped = metrics.skipped ? skipped + 1 : 0;
    if (EvaluatesAfter(steps) && !stop_) {
      BURST_ASSIGN_OR_RETURN(metrics.val_loss, Evaluate());
    }
    if (report_ != nullptr) BURST_RETURN_IF_ERROR(Record(metrics));
    if (skipped == kMaxSkippedSteps) return NotFinite();
    if (SavesAfter(steps) || stop_) BURST_RETURN_IF_ERROR(Checkpoint());
  }
  return Finish(SecondsSince(start));
}

bool Trainer::EvaluatesAfter(int64_t steps) const {
  return config_.eval_every > 0 && (steps == config_.steps || steps % config_.eval_every == 0);
}

bool Trainer::SavesAfter(int64_t steps) const {
  const int64_t every = config_.checkpoint_every;
  return steps == config_.steps || (every > 0 && steps % every == 0);
}

absl::Status Trainer::Record(const StepMetrics& metrics) {
  BURST_RETURN_IF_ERROR(report_->folder.metrics().Append(metrics));
  if (report_->console == nullptr) return absl::OkStatus();
  report_->console->Step(metrics);
  if (metrics.skipped) {
    report_->console->Print(
        absl::StrCat("step ", metrics.step, " skipped: its loss or gradient is not finite"));
  }
  if (metrics.val_loss.has_value()) {
    report_->console->Print(
        absl::StrFormat("step %d: validation loss %.4f", metrics.step, *metrics.val_loss));
  }
  return absl::OkStatus();
}

// Every rank comes here at once; one of them speaks, the others wait until its failure frees them.
absl::Status Trainer::NotFinite() const {
  if (comm_->rank() != 0) BURST_RETURN_IF_ERROR(comm_->Barrier());
  return absl::AbortedError(absl::StrCat(
      "the loss or its gradient was not finite in the last ", kMaxSkippedSteps, " steps, to step ",
      step_, "; try a lower --lr, a longer --warmup or a smaller --clip"));
}

absl::StatusOr<StepMetrics> Trainer::Step(int64_t step, bool enqueue_next) {
  if (begun_.empty()) BURST_RETURN_IF_ERROR(Begin(step));
  BURST_CHECK_EQ(begun_.front().step, step) << "Step was told to go on";
  BURST_ASSIGN_OR_RETURN(stop_, AnyRankStops());
  if (enqueue_next && !stop_ && model_->device() == DeviceType::kCuda) {
    BURST_RETURN_IF_ERROR(Begin(step + 1));
  }
  return End();
}

//   loss = 1/n sum over ranks, micro-batches and targets of -log p(target),   n: all of the targets
//   g = d loss / d parameters, scaled to a norm of at most clip;  AdamW(g)
//
// The host waits for nothing: what it learns of the step, it learns in End.
absl::Status Trainer::Begin(int64_t step) {
  begun_.push_back({step, config_.lr(step), Clock::now()});
  ParameterList& parameters = model_->parameters();
  parameters.ZeroGrad();
  const int64_t passes = config_.accumulate;
  const int64_t num_targets =
      windows_->TrainingTargets(step * passes * config_.batch, passes * config_.batch);
  const double loss_scale = 1.0 / static_cast<double>(std::max<int64_t>(1, num_targets));
  const Tensor loss_and_norm = Tensor::Empty({2}, DType::kFloat64, model_->device());
  const Tensor loss = loss_and_norm.Slice(0, 0, 1), norm = loss_and_norm.Slice(0, 1, 1);
  for (int64_t pass = step * passes; pass < (step + 1) * passes; ++pass) {
    BURST_RETURN_IF_ERROR(Backpropagate(pass, loss_scale, loss));
  }
  BURST_RETURN_IF_ERROR(gradients_->Finish(norm));
  BURST_RETURN_IF_ERROR(comm_->Wait(Channel::kCollective));

  const Tensor rounded = model_->dtype() == DType::kBFloat16 ? parameters.values() : Tensor();
  optimizer_->Step(parameters.masters(), rounded, parameters.grads(), loss_and_norm, config_.clip,
                   begun_.back().lr);
  readback_[step % 2]->Post(loss_and_norm.raw_data(), loss_and_norm.size_bytes());
  return absl::OkStatus();
}

// All ranks stop after the same step. And none waits for its GPU's part in a step before all have
// begun that.
absl::StatusOr<bool> Trainer::AnyRankStops() {
  const Tensor stop = Tensor::FromVector<double>({InterruptSignal() != 0 ? 1.0 : 0.0}, {1});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(stop));
  return stop.data<double>()[0] > 0;
}

// The results of the step that was begun first.
absl::StatusOr<StepMetrics> Trainer::End() {
  const BegunStep begun = begun_.front();
  begun_.pop_front();
  const auto* loss_and_norm = static_cast<const double*>(readback_[begun.step % 2]->Wait());
  StepMetrics metrics;
  metrics.lr = begun.lr;
  metrics.loss = loss_and_norm[0];
  metrics.grad_norm = loss_and_norm[1];
  metrics.skipped = !std::isfinite(metrics.loss) || !std::isfinite(metrics.grad_norm);

  // Begun while the device worked on the step before, it took the time since that one's end.
  const auto now = Clock::now();
  const double seconds =
      std::chrono::duration<double>(now - std::max(begun.begin, std::exchange(ended_, now)))
          .count();
  const int64_t step_tokens = config_.accumulate * config_.batch * config_.seqlen;
  metrics.step = begun.step + 1;
  metrics.tokens = metrics.step * step_tokens;
  metrics.tokens_per_second = static_cast<double>(step_tokens) / seconds;
  metrics.step_ms = 1e3 * seconds;
  return metrics;
}

std::pair<int64_t, int64_t> Trainer::Share(int64_t count) const {
  const int64_t groups = config_.mesh.data;
  return {count * data_rank_ / groups, count * (data_rank_ + 1) / groups};
}

// Forward and backward of micro-batch number `pass` of the run. This rank's part of its loss goes
// into `loss`, [1] float64, and its part of the gradients is added to what is there. In the last
// pass of a step, both set out to be summed over ranks as soon as they are complete, beside the
// rest of the backward.
absl::Status Trainer::Backpropagate(int64_t pass, double loss_scale, const Tensor& loss) {
  const int64_t micro = pass % config_.accumulate;
  const bool last = micro + 1 == config_.accumulate;
  const auto [begin, end] = Share(config_.batch);
  const GlobalBatch batch = windows_->Training(pass * config_.batch + begin, end - begin);
  BURST_ASSIGN_OR_RETURN(auto schedule, ScheduleFor(batch));
  const SequenceBatch slice = SliceForRank(batch, std::move(schedule), model_->device());
  const DropoutKey dropout{static_cast<uint64_t>(config_.seed), static_cast<uint64_t>(pass),
                           config_.model.dropout > 0, begin};
  Tape tape;
  const GradientsReady ready = [&](int first, int last) {
    const absl::Status status = gradients_->Post(first, last);
    if (!status.ok()) tape.Fail(status);
  };
  const Variable part =
      model_->Loss(tape, *attention_, slice, loss_scale, dropout, last ? ready : nullptr);
  BURST_RETURN_IF_ERROR(tape.status());
  if (micro == 0) {
    loss.ConvertFrom(part.value().View({1}));
  } else {
    loss.Add(part.value().View({1}).To(DType::kFloat64));
  }
  if (last) BURST_RETURN_IF_ERROR(comm_->PostAllReduceSum(loss));
  return tape.Backward(part);
}

absl::StatusOr<double> Trainer::Evaluate() {
  const int64_t all = validation_windows_->max_evaluation();
  const int64_t wanted = config_.eval_batches * config_.batch;
  const int64_t total = config_.eval_batches == 0 ? all : std::min(all, wanted);
  const Tensor sums = Tensor::Zeros({2}, DType::kFloat64, model_->device());
  const Tensor sum = sums.Slice(0, 0, 1), targets = sums.Slice(0, 1, 1);
  int64_t num_targets = 0;
  for (int64_t first = 0; first < total; first += config_.batch) {
    const auto [begin, end] = Share(std::min(config_.batch, total - first));
    if (begin == end) continue;  // fewer sequences than groups
    const GlobalBatch batch = validation_windows_->Evaluation(first + begin, end - begin, total);
    BURST_ASSIGN_OR_RETURN(auto schedule, ScheduleFor(batch));
    Tape tape(/*recording=*/false);
    const SequenceBatch slice = SliceForRank(batch, std::move(schedule), model_->device());
    const Variable loss = model_->Loss(tape, *attention_, slice, /*loss_scale=*/1, DropoutKey());
    BURST_RETURN_IF_ERROR(tape.status());
    sum.Add(loss.value().View({1}).To(DType::kFloat64));
    num_targets += batch.num_targets;
  }
  // One rank of a group counts for it.
  if (config_.mesh.sequence_rank(comm_->rank()) == 0) {
    targets.Fill(static_cast<double>(num_targets));
  }
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sums));
  const std::vector<double> results = sums.ToVector<double>();
  return results[0] / std::max(1.0, results[1]);
}

absl::StatusOr<std::shared_ptr<const RingSchedule>> Trainer::ScheduleFor(const GlobalBatch& batch) {
  if (schedule_ == nullptr || config_.packed) {
    BURST_ASSIGN_OR_RETURN(RingSchedule schedule,
                           attention_->Schedule(batch.seqlen, batch.documents));
    schedule_ = std::make_shared<const RingSchedule>(std::move(schedule));
  }
  return schedule_;
}

absl::Status Trainer::Checkpoint() {
  // Of the ranks of a model, those of the first.
  Communicator* const group = tensor_parallel_ ? sequence_.get() : nullptr;
  if (group == nullptr ? report_ == nullptr : data_rank_ > 0) return absl::OkStatus();
  CheckpointInfo info;
  info.step = step_;
  info.updates = optimizer_->updates();
  info.seqlen = config_.seqlen;
  info.window = config_.window;
  info.model = config_.model;
  info.tokenizer = setup_.data.tokenizer;
  info.config = config_.ToJson();
  info.data_fingerprint = setup_.data_fingerprint;
  const std::string path = report_ == nullptr ? "" : report_->folder.checkpoint();
  BURST_RETURN_IF_ERROR(SaveCheckpoint(path, info, model_->parameters(), *optimizer_, group));
  return report_ == nullptr ? absl::OkStatus() : report_->folder.Plot(config_.model_name);
}

absl::Status Trainer::OpenReport(bool verbose, double peak_flops) {
  BURST_ASSIGN_OR_RETURN(RunFolder folder, RunFolder::Open(config_, step_));
  report_.reset(new Report{std::move(folder), nullptr});
  if (!verbose) return absl::OkStatus();

  const ResolvedConfig& o = config_;
  const ModelConfig& m = config_.model;
  const LrSchedule& lr = config_.lr;
  const Transformer::FlopsPerToken flops = model_->TrainingFlopsPerToken(o.seqlen);
  BURST_ASSIGN_OR_RETURN(const int64_t num_parameters, Transformer::CountParameters(m));
  report_->console = std::make_unique<Console>(o.steps, o.log_every, Throughput{flops, peak_flops});
  const int64_t step_tokens = o.batch * o.accumulate * o.seqlen;
  const double epochs = static_cast<double>(o.steps * o.batch * o.accumulate) /
                        static_cast<double>(windows_->per_epoch());
  std::string attention = o.window > 0 ? absl::StrCat("window of ", o.window) : "causal";
  if (o.packed) attention += ", packed documents";
  const std::string recomputed =
      o.recompute == Recompute::kNone
          ? ""
          : absl::StrCat("; ", Name(o.recompute), " recomputation in the backward");
  report_->console->Table(
      absl::StrFormat("%s: %s, %s parameters", config_.model_name, Name(m.family),
                      Thousands(num_parameters)),
      {{"data", setup_.data.summary},
       {"",
        absl::StrFormat("trains on %s tokens, validates on %s", Thousands(setup_.data.train.size()),
                        Thousands(setup_.data.validation.size()))},
       {"model", absl::StrFormat("%d layers, width %d, %d heads (%d for keys), vocabulary %d%s",
                                 m.layers, m.width, m.heads, m.kv_heads > 0 ? m.kv_heads : m.heads,
                                 m.vocab, recomputed)},
       {"attention", absl::StrFormat("%d tokens, %s; %s over %d ranks, %s", o.seqlen, attention,
                                     Name(o.layout), config_.mesh.sequence, StrategyText(config_))},
       {"ranks", Ranks(config_)},
       {"step", absl::StrFormat("%d sequences x %d passes = %s tokens; %d steps, %.2f epochs",
                                o.batch, o.accumulate, Thousands(step_tokens), o.steps, epochs)},
       {"optimizer",
        absl::StrFormat("AdamW, lr %g to %g (%s, %d steps of warm-up), decay %g, "
                        "clip %g",
                        lr.lr, lr.min_lr, Name(lr.shape), lr.warmup, o.weight_decay, o.clip)},
       {"machine", Machine(config_, comm_->world_size(), peak_flops)},
       {"run folder", report_->folder.path()}});
  if (step_ > 0) report_->console->Print(absl::StrCat("going on after step ", step_));
  return absl::OkStatus();
}

absl::Status Trainer::Finish(double seconds) {
  if (report_ == nullptr || report_->console == nullptr) return absl::OkStatus();
  Console& console = *report_->console;
  if (stop_) {
    console.Print(absl::StrFormat("stopped after step %d; go on with --resume --out=%s", step_,
                                  report_->folder.path()));
    return absl::OkStatus();
  }
  console.Print(absl::StrFormat(
      "%s steps in %s; tensors took at most %.1f MiB", Thousands(step_), ShortDuration(seconds),
      static_cast<double>(GetMemoryStats(model_->device()).peak_bytes) / (1 << 20)));
  BURST_RETURN_IF_ERROR(Sample());
  console.Print(absl::StrCat("The run is in ", report_->folder.path()));
  return absl::OkStatus();
}

// The model as it was just saved, on this rank alone.
absl::StatusOr<std::unique_ptr<Transformer>> Trainer::WholeModel() const {
  BURST_ASSIGN_OR_RETURN(auto model, Transformer::Create(config_.model, config_.dtype,
                                                         /*seed=*/0, config_.device));
  BURST_RETURN_IF_ERROR(
      LoadCheckpoint(report_->folder.checkpoint(), &model->parameters(), nullptr));
  return model;
}

// A text by the model as it is now, so that numbers are not all there is to see.
absl::Status Trainer::Sample() {
  if (setup_.sample == 0) return absl::OkStatus();
  const Tokenizer& tokenizer = *setup_.data.tokenizer;
  GenerationOptions generation;
  generation.sampling.seed = static_cast<uint64_t>(config_.seed);
  generation.tokens = setup_.sample;
  generation.context = config_.seqlen;
  generation.window = config_.window;
  std::string text;
  BURST_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, EncodePrompt(tokenizer, ""));
  std::unique_ptr<Transformer> whole;
  if (tensor_parallel_) {
    BURST_ASSIGN_OR_RETURN(whole, WholeModel());
  }
  BURST_RETURN_IF_ERROR(Generate(whole == nullptr ? *model_ : *whole, tokenizer, prompt, generation,
                                 [&](absl::string_view piece) { absl::StrAppend(&text, piece); }));
  report_->console->Print(absl::StrCat("\nA sample:\n\n", text, "\n"));
  return absl::OkStatus();
}

}  // namespace burst
