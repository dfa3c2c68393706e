#include "train/trainer/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/process.h"
#include "burst/device/memory.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/report/peak_flops.h"
#include "train/trainer/sample.h"

namespace burst {
namespace {

constexpr int kMaxSkippedSteps = 5;

// Returns whether the model's weights are finite. The function takes no memory from the pool, whose
// lock another thread may have held at the fork of this process.
bool WeightsAreFinite(const Transformer& model) {
  const Tensor masters = model.parameters().masters();
  const auto* first = static_cast<const float*>(masters.raw_data());
  return std::all_of(first, first + masters.numel(), [](float x) { return std::isfinite(x); });
}

}  // namespace

Trainer::Trainer(std::unique_ptr<RankState> rank)
    : rank_(std::move(rank)),
      config_(rank_->config),
      saver_(rank_->setup, rank_->comm, rank_->tensor.get(), rank_->model->parameters(),
             *rank_->optimizer),
      stop_(rank_->comm, &saver_),
      batches_(*rank_) {}

Trainer::~Trainer() = default;

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainingSetup& setup,
                                                         Communicator* comm, bool verbose) {
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<RankState> rank, RankState::Create(setup, comm));
  std::unique_ptr<Trainer> trainer(new Trainer(std::move(rank)));
  BURST_RETURN_IF_ERROR(trainer->MakeParts());
  if (setup.simulated) return trainer;
  BURST_RETURN_IF_ERROR(trainer->rank_->Load());
  if (setup.resumed.has_value()) trainer->step_ = setup.resumed->step;
  BURST_RETURN_IF_ERROR(trainer->OpenReport(verbose));
  return trainer;
}

absl::Status Trainer::MakeParts() {
  const TrainingData& data = rank_->setup.data;
  const SequenceSampler::Options options{config_.seqlen, static_cast<uint64_t>(config_.seed),
                                         config_.packed};
  BURST_ASSIGN_OR_RETURN(SequenceSampler training, SequenceSampler::Create(data.train, options));
  steps_ = std::make_unique<StepRunner>(rank_.get(), &batches_, std::move(training), [this] {
    if (snapshot_ != nullptr) snapshot_->BeginChange();
    saver_.BeforeUpdate();
  });
  if (config_.eval_every == 0) return absl::OkStatus();
  BURST_ASSIGN_OR_RETURN(SequenceSampler validation,
                         SequenceSampler::Create(data.validation, options));
  evaluator_.emplace(rank_.get(), &batches_, std::move(validation), &stop_);
  return rank_->setup.simulated ? absl::OkStatus() : evaluator_->CheckTargets();
}

absl::Status Trainer::OpenReport(bool verbose) {
  RunReport::Facts facts;
  facts.step = step_;
  facts.sequences_per_epoch = steps_->sequences_per_epoch();
  facts.kept = kept_bytes();
  facts.throughput.flops_per_token = model().TrainingFlopsPerToken(config_.seqlen);
  // All ranks measure their peak at once, on the cores that the run will use.
  BURST_RETURN_IF_ERROR(rank_->comm->Barrier());
  const double own = verbose ? MeasurePeakFlops(config_.device, config_.dtype) : 0;
  const Tensor peak = Tensor::FromVector<double>({own}, {1});
  BURST_RETURN_IF_ERROR(rank_->comm->AllReduceSum(peak));
  facts.throughput.peak_flops = peak.data<double>()[0];
  if (rank_->comm->rank() == 0) {
    BURST_ASSIGN_OR_RETURN(report_, RunReport::Open(rank_->setup, facts, verbose));
  }
  return saver_.Open(report_.get());
}

int64_t Trainer::host_bytes() const {
  return model().offload_bytes() + kept_bytes().optimizer_on_host + saver_.host_bytes();
}

absl::Status Trainer::Train() {
  const StopsBetweenSteps asks;
  const auto start = std::chrono::steady_clock::now();
  if (config_.device == DeviceType::kCuda) {
    // Page-locking may wait for all GPUs of the process, which must not wait for other ranks then.
    saver_.Reserve();
    BURST_RETURN_IF_ERROR(rank_->comm->Barrier());
  }
  BURST_RETURN_IF_ERROR(MakeUpEvaluation());
  snapshot_ = MakeSnapshot();
  while (step_ < config_.steps && !stop_.stops()) BURST_RETURN_IF_ERROR(TrainStep());
  BURST_RETURN_IF_ERROR(saver_.Await());
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return ReportEnd(elapsed.count());
}

absl::Status Trainer::TrainStep() {
  const int64_t steps = step_ + 1;
  // The next step is enqueued unless something comes between, or this step may end the run.
  const bool enqueue_next = steps < config_.steps && !EvaluatesAfter(steps) && !SavesAfter(steps) &&
                            steps + 1 != config_.profile_first && steps != config_.profile_last &&
                            skipped_ + 1 < kMaxSkippedSteps;
  if (steps == config_.profile_first) profiled_ = Profile(config_.device);
  BURST_ASSIGN_OR_RETURN(StepMetrics metrics, Step(step_, enqueue_next));
  if (steps == config_.profile_last) profiled_.reset();
  step_ = steps;
  skipped_ = metrics.skipped ? skipped_ + 1 : 0;
  last_val_loss_.reset();
  if (report_ != nullptr) BURST_RETURN_IF_ERROR(report_->Record(metrics));
  BURST_RETURN_IF_ERROR(saver_.EndWritten());
  if (snapshot_ != nullptr) snapshot_->EndChange();
  if (EvaluatesAfter(steps)) BURST_RETURN_IF_ERROR(EvaluateStep(&metrics));
  saved_ = true;
  if (SavesAfter(steps) && skipped_ < kMaxSkippedSteps) {
    BURST_RETURN_IF_ERROR(Save(metrics));
  }
  // Printing comes last because it may wait: mpirun reads no output while it ends its processes.
  if (report_ != nullptr) report_->Print(metrics, saved_);
  if (skipped_ < kMaxSkippedSteps) return absl::OkStatus();
  return NotFinite(absl::StrCat("the loss or its gradient was not finite in the last ",
                                kMaxSkippedSteps, " steps, to step ", step_));
}

absl::StatusOr<StepMetrics> Trainer::Step(int64_t step, bool enqueue_next) {
  if (!steps_->first_enqueued().has_value()) {
    BURST_RETURN_IF_ERROR(steps_->Enqueue(step, follows_));
  }
  BURST_CHECK_EQ(*steps_->first_enqueued(), step) << "the call before was told of the next step";
  BURST_RETURN_IF_ERROR(stop_.Agree());
  follows_ = enqueue_next && !stop_.stops();
  if (follows_ && config_.device == DeviceType::kCuda) {
    BURST_RETURN_IF_ERROR(steps_->Enqueue(step + 1, /*follows=*/true));
  }
  return steps_->Complete();
}

bool Trainer::EvaluatesAfter(int64_t steps) const {
  return config_.eval_every > 0 && (steps == config_.steps || steps % config_.eval_every == 0);
}

bool Trainer::SavesAfter(int64_t steps) const {
  if (config_.checkpoint_files == CheckpointFiles::kNone) return false;
  const int64_t every = config_.checkpoint_every;
  return stop_.stops() || steps == config_.steps || (every > 0 && steps % every == 0);
}

// The row of the step that was just made has no validation loss yet.
absl::Status Trainer::EvaluateStep(StepMetrics* metrics) {
  BURST_RETURN_IF_ERROR(Validate(metrics));
  if (!metrics->val_loss.has_value()) return absl::OkStatus();
  if (snapshot_ != nullptr) snapshot_->BeginChange();
  last_val_loss_ = metrics->val_loss;
  if (report_ != nullptr) BURST_RETURN_IF_ERROR(report_->Evaluated(*metrics));
  if (snapshot_ != nullptr) snapshot_->EndChange();
  return absl::OkStatus();
}

absl::Status Trainer::Validate(StepMetrics* row) {
  BURST_ASSIGN_OR_RETURN(const std::optional<double> loss, Evaluate());
  std::optional<double> of_average;
  if (loss.has_value() && config_.ema > 0 && rank_->optimizer->updates() > 0) {
    BURST_ASSIGN_OR_RETURN(of_average, evaluator_->MeanLossOfAverage());
    if (!of_average.has_value()) return absl::OkStatus();
  }
  row->val_loss = loss;
  row->val_loss_ema = of_average;
  return absl::OkStatus();
}

absl::Status Trainer::MakeUpEvaluation() {
  if (step_ == 0 || !EvaluatesAfter(step_)) return absl::OkStatus();
  const bool lacks = report_ != nullptr && report_->LacksEvaluation(step_);
  BURST_ASSIGN_OR_RETURN(const bool missing, rank_->OnAnyRank(lacks));
  if (!missing) return absl::OkStatus();
  StepMetrics row;
  row.step = step_;
  BURST_RETURN_IF_ERROR(Validate(&row));
  if (report_ == nullptr || !row.val_loss.has_value()) return absl::OkStatus();
  BURST_RETURN_IF_ERROR(report_->Evaluated(row));
  report_->PrintEvaluation(row);
  return absl::OkStatus();
}

absl::Status Trainer::Save(const StepMetrics& last) {
  if (snapshot_ != nullptr) snapshot_->BeginSave();
  saved_ = false;
  {
    const ScopedPhase phase("save");
    if (!last.skipped) {
      BURST_ASSIGN_OR_RETURN(saved_, steps_->CanContinue(step_));
    }
    if (saved_) BURST_RETURN_IF_ERROR(saver_.Save(step_, last.val_loss));
  }
  if (snapshot_ != nullptr) snapshot_->EndChange();
  return absl::OkStatus();
}

// Runs whose state is divided over ranks have no snapshot, because the ranks need one another for a
// set of files. Runs on GPUs have none either, because their state is not in the host's memory. A
// launcher must give such runs the time that a save takes.
std::unique_ptr<SnapshotOnSignal> Trainer::MakeSnapshot() {
  if (report_ == nullptr || config_.comm == CommKind::kThreads || rank_->tensor != nullptr ||
      config_.zero > 0 || config_.checkpoint_files != CheckpointFiles::kOne ||
      config_.device != DeviceType::kCpu) {
    return nullptr;
  }
  return std::make_unique<SnapshotOnSignal>(
      [this] {
        // A single rank cannot check more than this. Older checkpoints stay.
        const bool good = skipped_ == 0 && WeightsAreFinite(model());
        return good && step_ > saver_.saved_step() ? saver_.SaveForked(step_, last_val_loss_)
                                                   : absl::OkStatus();
      },
      [this] { return saver_.busy(); });
}

absl::Status Trainer::ReportEnd(double seconds) {
  if (!saved_ && !stop_.stops()) {
    return NotFinite(absl::StrCat("the model is not finite after step ", step_, ", the last one"));
  }
  if (report_ == nullptr) return absl::OkStatus();
  if (config_.checkpoint_files == CheckpointFiles::kNone) {  // no save has drawn the plot
    RunFolder& folder = report_->folder();
    BURST_RETURN_IF_ERROR(folder.Plot(config_.model_name, folder.metrics().rows()));
  }
  if (stop_.stops()) {
    report_->Stopped(step_);
    return absl::OkStatus();
  }
  const int64_t peak_bytes = GetMemoryStats(config_.device).peak_bytes;
  std::string sample;
  if (rank_->setup.sample > 0 && report_->prints()) {
    BURST_ASSIGN_OR_RETURN(sample, SampleText(*rank_, report_->folder()));
  }
  report_->Finished(step_, seconds, peak_bytes, sample);
  return absl::OkStatus();
}

// Every rank calls this at once. Rank 0 returns the error, and the others wait until its failure
// ends them.
absl::Status Trainer::NotFinite(absl::string_view what) {
  const absl::Status written = saver_.Await();
  if (rank_->comm->rank() != 0) BURST_RETURN_IF_ERROR(rank_->comm->Barrier());
  std::string error =
      absl::StrCat(what, "; try a lower --lr, a longer --warmup or a smaller --clip");
  const int64_t saved = report_ == nullptr ? 0 : report_->folder().checkpoints().newest_step();
  if (saved > 0) absl::StrAppend(&error, "; --resume continues after step ", saved);
  if (!written.ok()) absl::StrAppend(&error, "; the last save failed: ", written.message());
  return absl::AbortedError(error);
}

}  // namespace burst
