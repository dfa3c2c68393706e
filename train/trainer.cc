#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/attention/exact_attention.h"
#include "burst/attention/strategy.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/process.h"
#include "burst/comm/mesh.h"
#include "burst/device/device.h"
#include "burst/device/memory.h"
#include "burst/device/profiler.h"
#include "model/tensor_parallel.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/huggingface/pretrained.h"
#include "train/report/peak_flops.h"

namespace burst {
namespace {

constexpr int kMaxSkippedSteps = 5;

// Elements of an offloaded state that go to the GPU at a time, of so many in all. Long enough that
// launches and latencies are little beside the host's link, short enough that the first and the
// last, which go alone, are little beside the rest, and that three of them are no memory to speak
// of: at most 48 MiB each.
int64_t StreamedElements(int64_t numel) {
  constexpr int64_t kLeast = int64_t{64} << 10, kMost = int64_t{4} << 20, kPieces = 64;
  return std::clamp(numel / kPieces / 64 * 64, kLeast, kMost);
}

// In this rank's shard.
std::vector<DecayRange> DecayRanges(const ParameterList& parameters) {
  std::vector<DecayRange> ranges;
  for (int i = 0; i < parameters.size(); ++i) {
    const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
    if (parameters[i].decay && piece.length > 0) {
      ranges.push_back({piece.at, piece.at + piece.length});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const DecayRange& a, const DecayRange& b) { return a.begin < b.begin; });
  return ranges;
}

}  // namespace

Trainer::Trainer(const TrainingSetup& setup, Communicator* comm)
    : setup_(setup),
      config_(setup.config),
      comm_(comm),
      data_rank_(setup.config.mesh.data_rank(comm->rank())),
      stage_(comm) {}

Trainer::~Trainer() = default;

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(const TrainingSetup& setup,
                                                         Communicator* comm, bool verbose) {
  std::unique_ptr<Trainer> trainer(new Trainer(setup, comm));
  BURST_RETURN_IF_ERROR(trainer->Init(verbose));
  return trainer;
}

absl::Status Trainer::Init(bool verbose) {
  const Mesh& mesh = config_.mesh;
  const bool groups = mesh.data > 1 || mesh.stages > 1 || mesh.tensor > 1;
  if (mesh.sequence > 1 && groups) {
    BURST_ASSIGN_OR_RETURN(sequence_, SplitSequence(mesh, *comm_));
  }
  // The exchanges of tensor parallelism must not wait for the reductions of parameter gradients: a
  // communicator of their own.
  if (mesh.tensor > 1) {
    BURST_ASSIGN_OR_RETURN(tensor_, SplitTensor(mesh, *comm_));
  }
  if (mesh.stages > 1) {
    BURST_ASSIGN_OR_RETURN(own_stage_, comm_->Split(mesh.stage(comm_->rank()), comm_->rank()));
    stage_ = own_stage_.get();
    BURST_ASSIGN_OR_RETURN(pipeline_, Pipeline::Create(mesh, static_cast<int>(config_.pp_chunks),
                                                       config_.model.tied_embeddings, comm_));
  }
  BURST_RETURN_IF_ERROR(MakeAttention(groups ? sequence_.get() : comm_));
  BURST_RETURN_IF_ERROR(CreateModel());
  const DeviceType device = config_.device;
  const uint64_t seed = static_cast<uint64_t>(config_.seed);
  for (auto& results : results_) results = std::make_unique<StepResults>(device);

  const SequenceSampler::Options sampler{config_.seqlen, seed, config_.packed};
  BURST_ASSIGN_OR_RETURN(training_data_, SequenceSampler::Create(setup_.data.train, sampler));
  if (config_.eval_every > 0) {
    BURST_ASSIGN_OR_RETURN(validation_data_,
                           SequenceSampler::Create(setup_.data.validation, sampler));
  }
  if (setup_.simulated) return absl::OkStatus();
  if (setup_.resumed.has_value()) {
    BURST_RETURN_IF_ERROR(Load());
    step_ = setup_.resumed->step;
  } else if (config_.pretrained.has_value()) {
    BURST_RETURN_IF_ERROR(LoadWeights());
  }
  return OpenReport(verbose);
}

absl::Status Trainer::MakeAttention(Communicator* group) {
  if (!config_.exact) {
    const Mesh& mesh = config_.mesh;
    const RankGroup tensor = {mesh.tensor, mesh.tensor_rank(comm_->rank())};
    BURST_ASSIGN_OR_RETURN(attention_,
                           CreateAttention(config_.AttentionStrategy(), config_.AttentionOptions(),
                                           config_.ulysses, group, tensor));
    return absl::OkStatus();
  }
  ExactAttentionOptions options;
  options.layout = config_.layout;
  options.chunk = std::min(config_.exact_chunk, config_.seqlen);
  options.rows = config_.exact_chunk / options.chunk;
  // Gradients of the mean loss of so many tokens, or fewer. A part of dK or dV has elements up to
  // 2^22 / chunks of those of one token whose loss is all there is, by steps of 2^-30.
  const int exponent = std::ilogb(static_cast<double>(step_tokens())) + 1;
  options.grid = ExactGrid::For(std::ldexp(1.0, -30 - exponent), config_.seqlen / options.chunk);
  BURST_ASSIGN_OR_RETURN(attention_, ExactAttention::Create(options, group));
  return absl::OkStatus();
}

absl::Status Trainer::CreateModel() {
  if (config_.fp8 && !setup_.simulated && CudaComputeCapability(0) < 89) {
    return InvalidOption("precision",
                         "fp8 needs a GPU of compute capability 8.9 or later (Ada, Hopper); got ",
                         CudaDeviceName(0), "; give bf16");
  }
  const Mesh& mesh = config_.mesh;
  TensorParallel parallel;
  if (tensor_ != nullptr) {
    parallel = TensorParallel(tensor_.get(), config_.spreads_stream());
  }
  const DeviceType device = config_.device;
  const bool draws =
      !setup_.resumed.has_value() && !config_.pretrained.has_value() && !setup_.simulated;
  StateSharding sharding;
  if (config_.zero > 0) {
    sharding = {static_cast<int>(config_.zero), config_.state_ranks(),
                stage_->rank() / mesh.tensor};
  }
  sharding.optimizer_on_host = OffloadsOptimizer(config_.offload);
  BURST_ASSIGN_OR_RETURN(
      model_,
      Transformer::Create(
          config_.model, config_.dtype,
          draws ? std::optional<uint64_t>(static_cast<uint64_t>(config_.seed)) : std::nullopt,
          device, parallel, sharding,
          PipelinePart{mesh.stage(comm_->rank()), mesh.stages,
                       static_cast<int>(config_.pp_chunks)}));
  ExecutionPlan execution;
  if (config_.fp8) execution.linear_precision = LinearPrecision::kFloat8;
  execution.recompute = config_.recompute;
  execution.segment = config_.recompute_segment;
  execution.ffn_chunk = config_.ffn_chunk;
  execution.head_chunk = config_.head_chunk;
  if (config_.exact) execution.exact = {config_.exact_chunk, step_tokens()};
  if (OffloadsActivations(config_.offload)) {
    // Before any rank waits for another's kernels, as page-locking wants it. A rank has at most one
    // token, or chunk, more than an equal share, rounded up.
    const int ranks = mesh.sequence * (config_.spreads_stream() ? mesh.tensor : 1);
    const int64_t step = config_.exact ? std::min(config_.exact_chunk, config_.seqlen) : 1;
    const int64_t share = (config_.seqlen / step + ranks - 1) / ranks + 1;
    const int64_t length = std::min(config_.seqlen, share * step);
    // Ulysses keeps its result for the heads that it computed, too.
    const bool exchanges = config_.strategy == Strategy::kUlysses ||
                           (config_.strategy == Strategy::kBurstUlysses && config_.ulysses > 1);
    const int64_t sequences = config_.batch / mesh.data;
    int64_t attended = length;
    if (mesh.tensor > 1) attended = std::min(config_.seqlen, share * ranks / mesh.sequence);
    const bool keeps_half = config_.recompute == Recompute::kSequence;
    if (keeps_half && (mesh.sequence == 1 || config_.layout == Layout::kZigzag ||
                       config_.layout == Layout::kStriped)) {
      attended = attended / 2 + 1;
    }
    execution.offload = {true, sequences * length, sequences * attended,
                         exchanges && mesh.sequence > 1 && !keeps_half ? 2 : 1};
  }
  model_->SetExecution(execution);
  const ParameterList& parameters = model_->parameters();
  Communicator* const group = tensor_.get();
  if (config_.zero < 2) {
    BURST_ASSIGN_OR_RETURN(gradients_, GradientReducer::Create(parameters, stage_, group));
    if (pipeline_ != nullptr) gradients_->set_stages(pipeline_->stages(), pipeline_->tied());
  }
  if (config_.zero > 0) {
    BURST_ASSIGN_OR_RETURN(shards_, ShardedState::Create(parameters, stage_, group));
    if (pipeline_ != nullptr) shards_->set_stages(pipeline_->stages(), pipeline_->tied());
    model_->set_parameter_use(shards_.get());
  }
  optimizer_ = std::make_unique<AdamW>(
      AdamWOptions{config_.beta1, config_.beta2, config_.eps, config_.weight_decay},
      parameters.shard_numel(), parameters.master_dtype(), DecayRanges(parameters), device,
      sharding.optimizer_on_host ? StreamedElements(parameters.shard_numel()) : 0);
  saver_ = std::make_unique<RunSaver>(setup_, comm_, tensor_.get(), parameters, *optimizer_);
  return absl::OkStatus();
}

absl::Status Trainer::Load() {
  const std::string path = CheckpointPath(config_.out);
  const absl::Status loaded =
      LoadCheckpoint(path, &model_->parameters(), optimizer_.get(), setup_.resumed->identity);
  const absl::Status status = AgreeOrWait(loaded, comm_);
  return status.ok() ? status : CannotResume(status, path);
}

absl::Status Trainer::LoadWeights() {
  absl::Status loaded = LoadPretrained(*config_.pretrained, &model_->parameters());
  if (!loaded.ok()) {
    loaded = absl::Status(loaded.code(), absl::StrCat("--model: ", loaded.message()));
  }
  return AgreeOrWait(loaded, comm_);
}

absl::Status Trainer::OpenReport(bool verbose) {
  RunReport::Facts facts;
  facts.step = step_;
  facts.sequences_per_epoch = training_data_->per_epoch();
  facts.kept = model_->parameters().kept_bytes();
  facts.throughput.flops_per_token = model_->TrainingFlopsPerToken(config_.seqlen);
  // The peak of all ranks at once, on the cores that the run will use.
  BURST_RETURN_IF_ERROR(comm_->Barrier());
  const double own = verbose ? MeasurePeakFlops(config_.device, config_.dtype) : 0;
  const Tensor peak = Tensor::FromVector<double>({own}, {1});
  BURST_RETURN_IF_ERROR(comm_->AllReduceSum(peak));
  facts.throughput.peak_flops = peak.data<double>()[0];
  if (comm_->rank() == 0) {
    BURST_ASSIGN_OR_RETURN(report_, RunReport::Open(setup_, facts, verbose));
  }
  return saver_->Open(report_.get());
}

int64_t Trainer::host_bytes() const {
  return model_->offload_bytes() + model_->parameters().kept_bytes().optimizer_on_host +
         saver_->host_bytes();
}

// ---- The run.

absl::Status Trainer::Train() {
  const StopsBetweenSteps asks;
  const auto start = std::chrono::steady_clock::now();
  if (model_->device() == DeviceType::kCuda) {
    // Page-locking may wait for all GPUs of the process, which must not wait for other ranks then.
    saver_->Reserve();
    BURST_RETURN_IF_ERROR(comm_->Barrier());
  }
  BURST_RETURN_IF_ERROR(MakeUpEvaluation());
  bool saved = true;
  snapshot_ = MakeSnapshot();
  std::unique_ptr<ProfiledRange> profiled;
  while (step_ < config_.steps && !stop_) {
    const int64_t steps = step_ + 1;
    // Unless something comes between, or this may be the step that ends the run.
    const bool enqueue_next = !EvaluatesAfter(steps) && !SavesAfter(steps) &&
                              steps + 1 != config_.profile_first && steps != config_.profile_last &&
                              skipped_ + 1 < kMaxSkippedSteps;
    if (steps == config_.profile_first) profiled = Profile(model_->device());
    BURST_ASSIGN_OR_RETURN(StepMetrics metrics, Step(step_, enqueue_next));
    if (steps == config_.profile_last) profiled.reset();
    step_ = steps;
    skipped_ = metrics.skipped ? skipped_ + 1 : 0;
    last_val_loss_.reset();
    if (report_ != nullptr) BURST_RETURN_IF_ERROR(report_->Record(metrics));
    BURST_RETURN_IF_ERROR(saver_->EndWritten());
    if (snapshot_ != nullptr) snapshot_->EndChange();
    if (EvaluatesAfter(steps)) BURST_RETURN_IF_ERROR(EvaluateStep(&metrics));
    saved = true;
    if ((SavesAfter(steps) || stop_) && skipped_ < kMaxSkippedSteps) {
      if (snapshot_ != nullptr) snapshot_->BeginSave();
      BURST_ASSIGN_OR_RETURN(saved, Checkpoint(metrics));
      if (snapshot_ != nullptr) snapshot_->EndChange();
    }
    // Last, for it may wait: mpirun reads no output while it ends its processes.
    if (report_ != nullptr) report_->Print(metrics, saved);
    if (skipped_ == kMaxSkippedSteps) {
      return NotFinite(absl::StrCat("the loss or its gradient was not finite in the last ",
                                    kMaxSkippedSteps, " steps, to step ", step_));
    }
  }
  BURST_RETURN_IF_ERROR(saver_->Await());
  if (!saved && !stop_) {
    return NotFinite(absl::StrCat("the model is not finite after step ", step_, ", the last one"));
  }
  if (report_ == nullptr) return absl::OkStatus();
  if (stop_) {
    report_->Stopped(step_);
    return absl::OkStatus();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const int64_t peak_bytes = GetMemoryStats(model_->device()).peak_bytes;
  BURST_ASSIGN_OR_RETURN(const std::string sample, Sample());
  report_->Finished(step_, elapsed.count(), peak_bytes, sample);
  return absl::OkStatus();
}

// Of the step that was just made, whose row has no validation loss yet.
absl::Status Trainer::EvaluateStep(StepMetrics* metrics) {
  BURST_ASSIGN_OR_RETURN(metrics->val_loss, Evaluate());
  if (!metrics->val_loss.has_value()) return absl::OkStatus();
  if (snapshot_ != nullptr) snapshot_->BeginChange();
  last_val_loss_ = metrics->val_loss;
  if (report_ != nullptr) BURST_RETURN_IF_ERROR(report_->Evaluated(*last_val_loss_));
  if (snapshot_ != nullptr) snapshot_->EndChange();
  return absl::OkStatus();
}

// A run that was stopped in an evaluation continues with it.
absl::Status Trainer::MakeUpEvaluation() {
  if (step_ == 0 || !EvaluatesAfter(step_)) return absl::OkStatus();
  const bool lacks = report_ != nullptr && report_->LacksEvaluation(step_);
  BURST_ASSIGN_OR_RETURN(const bool missing, OnAnyRank(lacks));
  if (!missing) return absl::OkStatus();
  BURST_ASSIGN_OR_RETURN(const std::optional<double> loss, Evaluate());
  if (report_ == nullptr || !loss.has_value()) return absl::OkStatus();
  BURST_RETURN_IF_ERROR(report_->Evaluated(*loss));
  report_->PrintEvaluation(step_, *loss);
  return absl::OkStatus();
}

bool Trainer::EvaluatesAfter(int64_t steps) const {
  return config_.eval_every > 0 && (steps == config_.steps || steps % config_.eval_every == 0);
}

bool Trainer::SavesAfter(int64_t steps) const {
  const int64_t every = config_.checkpoint_every;
  return steps == config_.steps || (every > 0 && steps % every == 0);
}

// Every rank comes here at once; rank 0 returns the error, the others wait until its failure ends
// them.
absl::Status Trainer::NotFinite(absl::string_view what) {
  const absl::Status written = saver_->Await();
  if (comm_->rank() != 0) BURST_RETURN_IF_ERROR(comm_->Barrier());
  std::string error =
      absl::StrCat(what, "; try a lower --lr, a longer --warmup or a smaller --clip");
  const int64_t saved = report_ == nullptr ? 0 : report_->folder().checkpoints().newest_step();
  if (saved > 0) absl::StrAppend(&error, "; --resume continues after step ", saved);
  if (!written.ok()) absl::StrAppend(&error, "; the last save failed: ", written.message());
  return absl::AbortedError(error);
}

}  // namespace burst
