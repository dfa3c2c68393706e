#include "benchmarks/scaling/model_experiments.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "benchmarks/harness/harness.h"
#include "benchmarks/scaling/ranks.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/device/memory.h"
#include "model/kv_cache.h"
#include "model/tensor_parallel.h"
#include "model/transformer.h"
#include "train/run/launch.h"
#include "train/run/setup.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

// A case of a whole model.
struct Case {
  Method method;
  int ranks;
  int64_t batch, seqlen;
  Recompute recompute;
};

std::vector<Case> Cases(const ScalingOptions& options) {
  std::vector<Case> cases;
  for (int64_t batch : options.batches) {
    for (int64_t seqlen : options.seqlens) {
      for (Method method : options.strategies) {
        for (int64_t ranks : RanksFor(method, options.ranks)) {
          for (Recompute recompute : options.recompute) {
            cases.push_back({method, static_cast<int>(ranks), batch, seqlen, recompute});
          }
        }
      }
    }
  }
  return cases;
}

ReportRow RowOf(const Case& c) {
  ReportRow row;
  row["strategy"] = Name(c.method);
  row["ranks"] = c.ranks;
  row["batch"] = c.batch;
  row["seqlen"] = c.seqlen;
  return row;
}

ExecutionPlan ChunksOf(const ResolvedConfig& config) {
  ExecutionPlan plan;
  plan.ffn_chunk = config.ffn_chunk;
  return plan;
}

// Returns the options of //train for a case, a run in the folder `out`. Only this function makes
// options of the trainer from a method.
absl::StatusOr<ResolvedConfig> ConfigOf(const ScalingOptions& options, const Case& c,
                                        const std::string& out = "") {
  TrainConfig config = options.train;
  config.out = out;
  config.eval_batches = 4;
  config.checkpoint_every = 0;
  config.sample = 0;
  config.batch = c.batch;
  config.seqlen = c.seqlen;
  config.recompute = c.recompute;
  if (c.recompute == Recompute::kNone) {
    config.recompute_segment = 1;
    const bool optimizer = OffloadsOptimizer(config.offload);
    config.offload = optimizer ? Offload::kOptimizer : Offload::kNone;
  }
  if (c.ranks == 1) config.zero = 0;
  config.ranks = c.ranks;
  config.strategy = c.method.strategy;
  if (c.method.tensor_parallel()) config.tp = c.ranks;
  config.layout = options.problem.options(c.method).layout;
  // Every method gets only the options that it uses.
  const TrainConfig defaults;
  if (!HasDirections(c.method.strategy)) config.ring_backward = defaults.ring_backward;
  if (c.method.strategy != Strategy::kBurstUlysses) config.ulysses = defaults.ulysses;
  if (!HasRing(c.method.strategy)) {
    config.ranks_per_node = defaults.ranks_per_node;
    config.ring_grad_dtype = defaults.ring_grad_dtype;
  }
  BURST_ASSIGN_OR_RETURN(ResolvedConfig resolved, ResolveConfig(config, DetectLaunch()));
  resolved.spreads_stream = c.method.megatron != Megatron::kTp;
  return resolved;
}

// ResetPeak and PeakMiB measure a rank's peak memory since the last reset. On the CPU it is the
// process's, divided by the ranks. All ranks call both, between barriers.
absl::Status ResetPeak(DeviceType device, Communicator& comm) {
  BURST_RETURN_IF_ERROR(comm.Barrier());
  if (comm.rank() == 0 || device == DeviceType::kCuda) ResetPeakMemory(device);
  return comm.Barrier();
}

double PeakMiB(DeviceType device, int ranks) {
  const double bytes = static_cast<double>(GetMemoryStats(device).peak_bytes);
  return bytes / (device == DeviceType::kCpu ? ranks : 1) / (1 << 20);
}

// ---- Prefill.

// Returns this rank's part of a batch of random tokens.
SequenceBatch RandomPrompt(int64_t batch, int64_t vocab, const LayerSchedules& schedules) {
  const std::vector<int32_t>& positions = schedules.shard().local_positions();
  const int64_t length = static_cast<int64_t>(positions.size());
  SequenceBatch prompt;
  prompt.tokens = Tensor::Empty({batch, length}, DType::kInt32);
  prompt.positions = Tensor::Empty({batch, length}, DType::kInt32);
  for (int64_t i = 0; i < batch * length; ++i) {
    const int32_t position = positions[i % length];
    prompt.positions.data<int32_t>()[i] = position;
    prompt.tokens.data<int32_t>()[i] =
        static_cast<int32_t>(Philox(/*key=*/3, i / length, position)[0] % vocab);
  }
  prompt.schedules = schedules;
  return prompt;
}

struct Prefill {
  double seconds = 0;  // the median of the repeats
  double peak_mib = 0;
};

absl::Status MeasurePrefill(Method method, const ResolvedConfig& config, const ModelConfig& shape,
                            int64_t repeats, Communicator& comm, Prefill* result) {
  BURST_ASSIGN_OR_RETURN(const auto attention, CreateAttentionOf(method, config.AttentionOptions(),
                                                                 config.ulysses, &comm));
  TensorParallel parallel;
  if (method.tensor_parallel()) parallel = TensorParallel(&comm, config.spreads_stream);
  BURST_ASSIGN_OR_RETURN(const auto model,
                         Transformer::Create(shape, config.dtype, /*seed=*/1, config.device,
                                             parallel, StateSharding::ValuesAlone()));
  model->SetExecution(ChunksOf(config));
  BURST_ASSIGN_OR_RETURN(
      const LayerSchedules schedules,
      MakeLayerSchedules(shape, *attention, config.seqlen, config.AttentionMask()));
  const SequenceBatch prompt = RandomPrompt(config.batch, shape.vocab, schedules);
  std::vector<double> seconds;
  for (int64_t repeat = 0; repeat <= repeats; ++repeat) {  // the first one touches fresh memory
    BURST_RETURN_IF_ERROR(ResetPeak(config.device, comm));
    const Stopwatch stopwatch;
    BURST_ASSIGN_OR_RETURN(const Tensor logits,
                           model->NextTokenLogits(*attention, prompt.To(config.device)));
    SynchronizeDevice(config.device);
    // The token is there when its rank is done. In a ring the other ranks end at about that time.
    BURST_RETURN_IF_ERROR(comm.Barrier());
    if (repeat > 0) seconds.push_back(stopwatch.Seconds());
  }
  result->seconds = Median(seconds);
  result->peak_mib = PeakMiB(config.device, comm.world_size());
  return comm.Barrier();
}

// ---- Generation.

struct Generation {
  double first_seconds = 0, token_seconds = 0;
  double cache_mib = 0;
  double bytes_per_second = 0;
};

absl::Status MeasureGeneration(const ResolvedConfig& config, const ModelConfig& shape,
                               int64_t tokens, Communicator& comm, Generation* result) {
  BURST_ASSIGN_OR_RETURN(
      const auto attention,
      CreateAttention(config.strategy, config.AttentionOptions(), config.ulysses, &comm));
  BURST_ASSIGN_OR_RETURN(const auto model,
                         Transformer::Create(shape, config.dtype, /*seed=*/1, config.device,
                                             /*parallel=*/{}, StateSharding::ValuesAlone()));
  model->SetExecution(ChunksOf(config));
  BURST_ASSIGN_OR_RETURN(
      const LayerSchedules schedules,
      MakeLayerSchedules(shape, *attention, config.seqlen, config.AttentionMask()));
  const SequenceBatch prompt = RandomPrompt(config.batch, shape.vocab, schedules).To(config.device);
  std::optional<KvCache> cache;
  // The first prefill touches fresh memory. Where it takes a minute, that is too little to repeat
  // it.
  constexpr double kLongSeconds = 60;
  double longest = 0;
  for (int repeat = 0; repeat < 2 && longest < kLongSeconds; ++repeat) {
    cache.emplace(shape, config.batch, config.dtype, config.window, config.device, &comm);
    cache->Reserve(schedules.shard().local_length() + tokens / comm.world_size() + 2);
    BURST_RETURN_IF_ERROR(comm.Barrier());
    const Stopwatch stopwatch;
    BURST_RETURN_IF_ERROR(model->NextTokenLogits(*attention, prompt, &*cache).status());
    SynchronizeDevice(config.device);
    BURST_RETURN_IF_ERROR(comm.Barrier());
    result->first_seconds = stopwatch.Seconds();
    BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm.AllGather(result->first_seconds));
    longest = *std::max_element(all.begin(), all.end());
  }
  const Tensor next = Tensor::Zeros({config.batch, 1}, DType::kInt32);
  std::vector<double> seconds;
  for (int64_t token = 0; token <= tokens; ++token) {
    const Stopwatch stopwatch;
    BURST_RETURN_IF_ERROR(model->Decode(*cache, next).status());
    SynchronizeDevice(config.device);
    if (token > 0) seconds.push_back(stopwatch.Seconds());
  }
  result->token_seconds = Median(seconds);
  const ModelConfig full = shape.WithDefaults();
  const double cache_bytes = 2.0 * full.layers * config.batch * schedules.shard().local_length() *
                             full.kv_heads * full.head_dim * SizeOf(config.dtype);
  const double weight_bytes =
      static_cast<double>(model->parameters().numel()) * SizeOf(config.dtype);
  result->cache_mib = cache_bytes / (1 << 20);
  result->bytes_per_second = (cache_bytes + weight_bytes) / result->token_seconds;
  return comm.Barrier();
}

// ---- Training.

struct Training {
  std::vector<double> losses;  // the losses of each step
  double val_loss = 0;
  double step_seconds = 0;  // the median of all but the first
  double peak_mib = 0;
};

absl::Status MeasureTraining(const TrainingSetup& setup, Communicator& comm, Training* result) {
  BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
  std::vector<double> step_ms;
  const int64_t steps = setup.config.steps;
  for (int64_t step = 0; step < steps; ++step) {
    if (step == 1) BURST_RETURN_IF_ERROR(ResetPeak(setup.config.device, comm));
    BURST_ASSIGN_OR_RETURN(const StepMetrics metrics,
                           trainer->Step(step, step > 0 && step + 1 < steps));
    result->losses.push_back(metrics.loss);
    if (step > 0) step_ms.push_back(metrics.step_ms);
  }
  result->step_seconds = 1e-3 * Median(step_ms);
  BURST_RETURN_IF_ERROR(comm.Barrier());
  result->peak_mib = PeakMiB(setup.config.device, comm.world_size());
  BURST_ASSIGN_OR_RETURN(const std::optional<double> val_loss, trainer->Evaluate());
  result->val_loss = *val_loss;
  return absl::OkStatus();
}

double LargestDifference(const std::vector<double>& losses, const std::vector<double>& reference) {
  double largest = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    largest = std::max(largest, std::abs(losses[i] - reference[i]) / std::abs(reference[i]));
  }
  return largest;
}

// Returns a field's largest value over ranks.
template <typename Measurement>
double Most(const std::vector<Measurement>& ranks, double Measurement::*field) {
  double most = 0;
  for (const Measurement& rank : ranks) most = std::max(most, rank.*field);
  return most;
}

}  // namespace

absl::Status CheckModelExperiment(const ScalingOptions& options) {
  if (options.experiment == Experiment::kAttention || options.experiment == Experiment::kError) {
    return absl::OkStatus();
  }
  for (const Case& c : Cases(options)) {
    BURST_RETURN_IF_ERROR(ConfigOf(options, c).status());
  }
  return absl::OkStatus();
}

std::vector<ReportColumn> PrefillColumns() {
  return {{"strategy", "strategy"},
          {"ranks", "ranks"},
          {"batch", "batch"},
          {"seqlen", "tokens"},
          {"latency_ms", "latency ms", 2},
          {"tokens_per_second", "tokens/s"},
          {"peak_mib_per_rank", "peak MiB", 1}};
}

absl::StatusOr<std::vector<ReportRow>> RunPrefillExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row) {
  std::vector<ReportRow> rows;
  for (const Case& c : Cases(options)) {
    BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, ConfigOf(options, c));
    ModelConfig shape = config.model;
    if (shape.vocab == 0) shape.vocab = 256;
    if (shape.context == 0) shape.context = c.seqlen;
    std::vector<Prefill> measured(c.ranks);
    BURST_RETURN_IF_ERROR(RunRanksInProcess(config, [&](Communicator& comm) {
      return MeasurePrefill(c.method, config, shape, options.repeats, comm, &measured[comm.rank()]);
    }));
    ReportRow row = RowOf(c);
    const double seconds = Most(measured, &Prefill::seconds);
    row["latency_ms"] = 1e3 * seconds;
    row["tokens_per_second"] = static_cast<double>(c.batch * c.seqlen) / seconds;
    row["peak_mib_per_rank"] = Most(measured, &Prefill::peak_mib);
    rows.push_back(row);
    on_row(row);
  }
  return rows;
}

std::vector<ReportColumn> GenerationColumns() {
  return {{"strategy", "strategy"},
          {"ranks", "ranks"},
          {"batch", "batch"},
          {"seqlen", "tokens"},
          {"first_ms", "first ms", 2},
          {"token_ms", "token ms", 3},
          {"tokens_per_second", "tokens/s", 1},
          {"cache_mib_per_rank", "cache MiB", 1},
          {"gb_per_second_per_rank", "GB/s", 1}};
}

absl::StatusOr<std::vector<ReportRow>> RunGenerationExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row) {
  std::vector<ReportRow> rows;
  for (const Case& c : Cases(options)) {
    BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, ConfigOf(options, c));
    ModelConfig shape = config.model;
    if (shape.vocab == 0) shape.vocab = 256;
    // GPT-2 also learns the positions of the generated tokens.
    if (shape.family == Family::kGpt2) shape.context = c.seqlen + options.tokens + 1;
    std::vector<Generation> measured(c.ranks);
    BURST_RETURN_IF_ERROR(RunRanksInProcess(config, [&](Communicator& comm) {
      return MeasureGeneration(config, shape, options.tokens, comm, &measured[comm.rank()]);
    }));
    ReportRow row = RowOf(c);
    const double seconds = Most(measured, &Generation::token_seconds);
    row["first_ms"] = 1e3 * Most(measured, &Generation::first_seconds);
    row["token_ms"] = 1e3 * seconds;
    row["tokens_per_second"] = static_cast<double>(c.batch) / seconds;
    row["cache_mib_per_rank"] = Most(measured, &Generation::cache_mib);
    row["gb_per_second_per_rank"] = 1e-9 * Most(measured, &Generation::bytes_per_second);
    rows.push_back(row);
    on_row(row);
  }
  return rows;
}

std::vector<ReportColumn> TrainingColumns() {
  return {{"strategy", "strategy"},
          {"ranks", "ranks"},
          {"batch", "batch"},
          {"seqlen", "tokens"},
          {"recompute", "recompute"},
          {"step_ms", "step ms", 2},
          {"tokens_per_second", "tokens/s"},
          {"peak_mib_per_rank", "peak MiB", 1},
          {"loss", "loss", 6},
          {"val_loss", "val loss", 6},
          {"perplexity", "perplexity", 4},
          {"loss_difference", "diff e-9", 1, 1e9}};
}

absl::StatusOr<std::vector<ReportRow>> RunTrainingExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row) {
  std::vector<ReportRow> rows;
  const TemporaryFolder folder;
  std::vector<double> reference;
  int64_t batch = 0, seqlen = 0;  // the reference's
  for (const Case& c : Cases(options)) {
    BURST_ASSIGN_OR_RETURN(const ResolvedConfig config,
                           ConfigOf(options, c, folder / absl::StrCat(rows.size())));
    BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareTraining(config));
    std::vector<Training> measured(c.ranks);
    BURST_RETURN_IF_ERROR(RunRanksInProcess(config, [&](Communicator& comm) {
      return MeasureTraining(setup, comm, &measured[comm.rank()]);
    }));
    const Training& first = measured[0];
    if (c.batch != batch || c.seqlen != seqlen) {
      reference = first.losses;
      batch = c.batch, seqlen = c.seqlen;
    }
    ReportRow row = RowOf(c);
    row["recompute"] = Name(c.recompute);
    const double seconds = Most(measured, &Training::step_seconds);
    row["step_ms"] = 1e3 * seconds;
    row["tokens_per_second"] = static_cast<double>(c.batch * c.seqlen) / seconds;
    row["peak_mib_per_rank"] = Most(measured, &Training::peak_mib);
    row["loss"] = first.losses.back();
    row["val_loss"] = first.val_loss;
    row["perplexity"] = std::exp(first.val_loss);
    row["loss_difference"] = LargestDifference(first.losses, reference);
    rows.push_back(row);
    on_row(row);
  }
  return rows;
}

}  // namespace burst
