#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/autograd/tape.h"
#include "burst/base/status.h"
#include "burst/device/memory.h"
#include "train/checkpoint.h"
#include "train/console.h"
#include "train/generate.h"
#include "train/interrupt.h"
#include "train/peak_flops.h"
#include "train/run_folder.h"
#include "train/text.h"

namespace burst {
namespace {

constexpr int kMaxSkippedSteps = 5;
constexpr DType kDType = DType::kFloat32;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::vector<DecayRange> DecayRanges(const ParameterList& parameters) {
  std::vector<DecayRange> ranges;
  for (const Parameter& p : parameters.all()) {
    if (p.decay) ranges.push_back({p.offset, p.offset + p.numel()});
  }
  return ranges;
}

}  // namespace

struct Trainer::Report {
  RunFolder folder;
  std::unique_ptr<Console> console;  // null: silent
};

Trainer::Trainer(const TrainingSetup& setup, Communicator* comm)
    : setup_(setup), options_(setup.config.options), comm_(comm) {}

Trainer::~Trainer() = default;

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainingSetup& setup,
                                                         Communicator* comm, bool verbose) {
  std::unique_ptr<Trainer> trainer(new Trainer(setup, comm));
  BURST_RETURN_IF_ERROR(trainer->Init(verbose));
  return trainer;
}

absl::Status Trainer::Init(bool verbose) {
  BurstAttentionOptions attention;
  attention.layout = options_.layout;
  attention.mask.window = options_.window;
  attention.backward = options_.backward;
  attention.deterministic = options_.deterministic;
  BURST_ASSIGN_OR_RETURN(attention_, BurstAttention::Create(attention, comm_));
  BURST_ASSIGN_OR_RETURN(model_, Transformer::Create(setup_.config.model, kDType,
                                                     static_cast<uint64_t>(options_.seed)));
  ParameterList& parameters = model_->parameters();
  optimizer_ = std::make_unique<AdamW>(
      AdamWOptions{options_.beta1, options_.beta2, options_.eps, options_.weight_decay},
      parameters.numel(), kDType, DecayRanges(parameters));

  const Windows::Options windows{options_.seqlen, static_cast<uint64_t>(options_.seed),
                                 options_.packed};
  BURST_ASSIGN_OR_RETURN(windows_, Windows::Create(setup_.data.train, windows));
  if (options_.eval_every > 0) {
    BURST_ASSIGN_OR_RETURN(validation_windows_, Windows::Create(setup_.data.validation, windows));
  }
  if (setup_.resumed.has_value()) {
    BURST_RETURN_IF_ERROR(
        LoadCheckpoint(CheckpointPath(options_.out), &parameters, optimizer_.get()));
    step_ = setup_.resumed->step;
  }

  // The peak of all ranks at once, on the cores that the run will use.
  BURST_RETURN_IF_ERROR(comm_->Barrier());
  Tensor peak = Tensor::FromVector<double>({verbose ? MeasurePeakFlops() : 0}, {1});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(peak));
  if (comm_->rank() == 0) return OpenReport(verbose, peak.data<double>()[0]);
  return absl::OkStatus();
}

absl::Status Trainer::Train() {
  const auto start = std::chrono::steady_clock::now();
  int skipped = 0;
  while (step_ < options_.steps && !stop_) {
    BURST_ASSIGN_OR_RETURN(StepMetrics metrics, Step(step_));
    ++step_;
    skipped = metrics.skipped ? skipped + 1 : 0;
    const bool last = step_ == options_.steps;
    const bool evaluate =
        options_.eval_every > 0 && !stop_ && (last || step_ % options_.eval_every == 0);
    if (evaluate) {
      BURST_ASSIGN_OR_RETURN(metrics.val_loss, Evaluate());
    }
    if (report_ != nullptr) BURST_RETURN_IF_ERROR(Record(metrics));
    if (skipped == kMaxSkippedSteps) return NotFinite();
    const bool periodic = options_.checkpoint_every > 0 && step_ % options_.checkpoint_every == 0;
    if (last || stop_ || periodic) BURST_RETURN_IF_ERROR(Checkpoint());
  }
  return Finish(SecondsSince(start));
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

//   loss = 1/n sum over ranks, micro-batches and targets of -log p(target),   n: all of the targets
//   g = d loss / d parameters, scaled to a norm of at most clip;  AdamW(g)
absl::StatusOr<StepMetrics> Trainer::Step(int64_t step) {
  const auto start = std::chrono::steady_clock::now();
  ParameterList& parameters = model_->parameters();
  parameters.ZeroGrad();

  std::vector<GlobalBatch> batches;
  int64_t num_targets = 0;
  for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
    const int64_t pass = step * options_.accumulate + micro;
    batches.push_back(windows_->Training(pass * options_.batch, options_.batch));
    num_targets += batches.back().num_targets;
  }
  const double loss_scale = 1.0 / static_cast<double>(std::max<int64_t>(1, num_targets));
  double local_loss = 0;
  for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
    const uint64_t pass = static_cast<uint64_t>(step * options_.accumulate + micro);
    BURST_ASSIGN_OR_RETURN(const double loss, Backpropagate(batches[micro], loss_scale, pass));
    local_loss += loss;
  }

  // With the loss travels the wish to stop, so that all ranks stop after the same step.
  const Tensor sums =
      Tensor::FromVector<double>({local_loss, InterruptSignal() != 0 ? 1.0 : 0.0}, {2});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(parameters.grads()));
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sums));
  stop_ = sums.data<double>()[1] > 0;

  StepMetrics metrics;
  metrics.loss = sums.data<double>()[0];
  metrics.grad_norm = L2Norm(parameters.grads()).ToVector<double>()[0];
  metrics.lr = setup_.config.lr(step);
  metrics.skipped = !std::isfinite(metrics.loss) || !std::isfinite(metrics.grad_norm);
  if (!metrics.skipped) {
    const Tensor loss_and_norm = Tensor::FromVector<double>({metrics.loss, metrics.grad_norm}, {2});
    optimizer_->Step(parameters.values(), /*compute=*/Tensor(), parameters.grads(), loss_and_norm,
                     options_.clip, metrics.lr);
    optimizer_->CountUpdate();
  }

  const double seconds = SecondsSince(start);
  const int64_t step_tokens = options_.accumulate * options_.batch * options_.seqlen;
  metrics.step = step + 1;
  metrics.tokens = metrics.step * step_tokens;
  metrics.tokens_per_second = static_cast<double>(step_tokens) / seconds;
  metrics.step_ms = 1e3 * seconds;
  return metrics;
}

// Adds this rank's part of a batch's gradients; returns its part of the loss.
absl::StatusOr<double> Trainer::Backpropagate(const GlobalBatch& batch, double loss_scale,
                                              uint64_t dropout_step) {
  BURST_ASSIGN_OR_RETURN(auto schedule, ScheduleFor(batch));
  const DropoutKey dropout{static_cast<uint64_t>(options_.seed), dropout_step,
                           setup_.config.model.dropout > 0};
  Tape tape;
  const Variable loss = model_->Loss(tape, *attention_, SliceForRank(batch, std::move(schedule)),
                                     loss_scale, dropout);
  BURST_RETURN_IF_ERROR(tape.status());
  const double value = loss.value().ToVector<double>()[0];
  BURST_RETURN_IF_ERROR(tape.Backward(loss));
  return value;
}

absl::StatusOr<double> Trainer::Evaluate() {
  const int64_t all = validation_windows_->max_evaluation();
  const int64_t wanted = options_.eval_batches * options_.batch;
  const int64_t total = options_.eval_batches == 0 ? all : std::min(all, wanted);
  const Tensor sum = Tensor::Zeros({1}, DType::kFloat64);
  int64_t num_targets = 0;
  for (int64_t first = 0; first < total; first += options_.batch) {
    const GlobalBatch batch =
        validation_windows_->Evaluation(first, std::min(options_.batch, total - first), total);
    BURST_ASSIGN_OR_RETURN(auto schedule, ScheduleFor(batch));
    Tape tape(/*recording=*/false);
    const Variable loss = model_->Loss(tape, *attention_, SliceForRank(batch, std::move(schedule)),
                                       /*loss_scale=*/1, DropoutKey());
    BURST_RETURN_IF_ERROR(tape.status());
    sum.data<double>()[0] += loss.value().ToVector<double>()[0];
    num_targets += batch.num_targets;
  }
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(sum));
  return sum.data<double>()[0] / static_cast<double>(std::max<int64_t>(1, num_targets));
}

absl::StatusOr<std::shared_ptr<const RingSchedule>> Trainer::ScheduleFor(const GlobalBatch& batch) {
  if (schedule_ == nullptr || options_.packed) {
    BURST_ASSIGN_OR_RETURN(RingSchedule schedule,
                           attention_->Schedule(batch.seqlen, batch.documents));
    schedule_ = std::make_shared<const RingSchedule>(std::move(schedule));
  }
  return schedule_;
}

absl::Status Trainer::Checkpoint() {
  if (report_ == nullptr) return absl::OkStatus();
  CheckpointInfo info;
  info.step = step_;
  info.updates = optimizer_->updates();
  info.seqlen = options_.seqlen;
  info.window = options_.window;
  info.model = setup_.config.model;
  info.tokenizer = setup_.data.tokenizer;
  info.config = TrainConfigToJson(options_);
  info.data_fingerprint = setup_.data_fingerprint;
  BURST_RETURN_IF_ERROR(
      SaveCheckpoint(report_->folder.checkpoint(), info, model_->parameters(), *optimizer_));
  return report_->folder.Plot(setup_.config.model_name);
}

absl::Status Trainer::OpenReport(bool verbose, double peak_flops) {
  BURST_ASSIGN_OR_RETURN(RunFolder folder, RunFolder::Open(setup_.config, step_));
  report_.reset(new Report{std::move(folder), nullptr});
  if (!verbose) return absl::OkStatus();

  const TrainConfig& o = options_;
  const ModelConfig& m = setup_.config.model;
  const LrSchedule& lr = setup_.config.lr;
  const Transformer::FlopsPerToken flops = model_->TrainingFlopsPerToken(o.seqlen);
  report_->console = std::make_unique<Console>(o.steps, o.log_every, Throughput{flops, peak_flops});
  const int64_t step_tokens = o.batch * o.accumulate * o.seqlen;
  const double epochs = static_cast<double>(o.steps * o.batch * o.accumulate) /
                        static_cast<double>(windows_->per_epoch());
  std::string attention = o.window > 0 ? absl::StrCat("window of ", o.window) : "causal";
  if (o.packed) attention += ", packed documents";
  report_->console->Table(
      absl::StrFormat("%s: %s, %s parameters", setup_.config.model_name, Name(m.family),
                      Thousands(model_->parameters().numel())),
      {{"data", setup_.data.summary},
       {"",
        absl::StrFormat("trains on %s tokens, validates on %s", Thousands(setup_.data.train.size()),
                        Thousands(setup_.data.validation.size()))},
       {"model",
        absl::StrFormat("%d layers, width %d, %d heads (%d for keys), vocabulary %d", m.layers,
                        m.width, m.heads, m.kv_heads > 0 ? m.kv_heads : m.heads, m.vocab)},
       {"attention", absl::StrFormat("%d tokens, %s; %s over %d %s, %s backward", o.seqlen,
                                     attention, Name(o.layout), comm_->world_size(),
                                     o.comm == CommKind::kMpi ? "MPI ranks" : "ranks in process",
                                     Name(o.backward))},
       {"step", absl::StrFormat("%d sequences x %d passes = %s tokens; %d steps, %.2f epochs",
                                o.batch, o.accumulate, Thousands(step_tokens), o.steps, epochs)},
       {"optimizer",
        absl::StrFormat("AdamW, lr %g to %g (%s, %d steps of warm-up), decay %g, "
                        "clip %g",
                        lr.lr, lr.min_lr, Name(lr.shape), lr.warmup, o.weight_decay, o.clip)},
       {"machine", absl::StrFormat("%d x %d threads, sgemm %.1f GFLOP/s measured: 100%% of MFU",
                                   comm_->world_size(), setup_.config.threads, peak_flops * 1e-9)},
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
      static_cast<double>(GetMemoryStats(DeviceType::kCpu).peak_bytes) / (1 << 20)));
  BURST_RETURN_IF_ERROR(Sample());
  console.Print(absl::StrCat("The run is in ", report_->folder.path()));
  return absl::OkStatus();
}

// A text by the model as it is now, so that numbers are not all there is to see.
absl::Status Trainer::Sample() {
  const int64_t tokens = options_.sample == -1 ? 256 : options_.sample;
  if (tokens == 0 || !setup_.data.tokenizer.has_value()) return absl::OkStatus();
  const Tokenizer& tokenizer = *setup_.data.tokenizer;
  GenerationOptions generation;
  generation.sampling.seed = static_cast<uint64_t>(options_.seed);
  generation.tokens = tokens;
  generation.context = options_.seqlen;
  generation.window = options_.window;
  std::string text;
  BURST_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, EncodePrompt(tokenizer, ""));
  BURST_RETURN_IF_ERROR(Generate(*model_, tokenizer, prompt, generation,
                                 [&](absl::string_view piece) { absl::StrAppend(&text, piece); }));
  report_->console->Print(absl::StrCat("\nA sample:\n\n", text, "\n"));
  return absl::OkStatus();
}

}  // namespace burst
