#include "train/plan/check_run.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/host_memory.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/cli/text.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "train/optimizer/muon_matrices.h"
#include "train/plan/fit.h"
#include "train/plan/gpu_models.h"
#include "train/plan/plan.h"

namespace burst {
namespace {

constexpr int kMostCheckedRanks = 32;  // a plan for more ranks takes too long for a start

// Returns the least number of values that all layers keep for the backward of a token. Layers of
// the Llama family keep what docs/training/memory.md says, GPT-2's keep less.
int64_t LeastActivations(const ResolvedConfig& config) {
  const ModelConfig model = config.model.WithDefaults();
  const int64_t more = model.family == Family::kLlama ? 1 : 0;
  int64_t values = model.width;
  if (config.recompute == Recompute::kNone && !config.exact) {
    const int64_t attention = model.attention_channels();
    values += (1 + more) * model.width + attention;
    if (config.head_chunk == 0) {
      values += (1 + more) * (attention + 2 * model.kv_heads * model.head_dim);
    }
    if (config.ffn_chunk == 0) values += model.width + (2 + more) * model.ffn;
  }
  return values * ((model.layers - 1) / config.recompute_segment + 1);
}

}  // namespace

absl::Status CheckRunFits(TrainingSetup* setup) {
  if (setup->config.ranks > kMostCheckedRanks) return absl::OkStatus();
  const absl::StatusOr<GpuModel> known = FindGpuModelOf(CudaDeviceName(0));
  // The memory of a step is the same on all GPUs. Its time is printed only for GPUs whose rates are
  // known.
  BURST_ASSIGN_OR_RETURN(GpuModel gpu, known.ok() ? known : FindGpuModel("H100"));
  gpu.memory = static_cast<double>(CudaFreeMemory());
  const int per_node = setup->config.ranks_per_node;
  const int on_this_node = std::max(per_node, std::min(setup->config.ranks, CudaDeviceCount()));
  gpu.host_memory = static_cast<double>(FreeHostMemory()) / on_this_node;
  const TrainingSetup question = PlanOf(*setup);
  BURST_ASSIGN_OR_RETURN(const StepPlan plan, PlanStep(question, gpu, per_node));
  setup->plan =
      absl::StrFormat("%.1f GiB of the %.1f free on a GPU",
                      static_cast<double>(plan.peak_bytes) / (1 << 30), gpu.memory / (1 << 30));
  if (known.ok()) {
    absl::StrAppendFormat(&setup->plan, "; %.3g s a step, %.0f tokens/s a GPU", plan.step_seconds,
                          plan.tokens_per_second);
  }
  return CheckFits(question, plan, gpu, per_node);
}

absl::Status CheckStateFits(const TrainingSetup& setup) {
  const ResolvedConfig& config = setup.config;
  BURST_ASSIGN_OR_RETURN(const std::vector<Parameter> list,
                         Transformer::ParametersOf(config.model));
  int64_t parameters = 0;
  for (const Parameter& parameter : list) parameters += parameter.numel();
  // Other processes may be on other hosts, and ranks with --zero divide a copy.
  const bool copies = config.comm == CommKind::kThreads && config.zero == 0;
  const int64_t ranks = copies ? config.mesh.data * config.mesh.sequence : 1;
  // Masters, gradients, two moments, and an average in float32. Muon's matrices have one moment.
  // Values in bfloat16 are not the masters.
  const int64_t copies_of_all = config.ema > 0 ? 5 : 4;
  const int64_t left_out = config.optimizer == OptimizerKind::kMuon ? MuonNumel(list) : 0;
  const int64_t value_bytes = config.dtype == DType::kBFloat16 ? SizeOf(config.dtype) : 0;
  const int64_t bytes =
      static_cast<int64_t>(sizeof(float)) * (copies_of_all * parameters - left_out) +
      value_bytes * parameters;
  const double needed = static_cast<double>(ranks) * static_cast<double>(bytes);
  const auto free = static_cast<double>(FreeHostMemory());
  if (needed <= free) {
    const int64_t processes = config.comm == CommKind::kThreads ? 1 : config.ranks;
    const double activations = static_cast<double>(SizeOf(config.dtype)) *
                               static_cast<double>(LeastActivations(config)) *
                               static_cast<double>(config.batch * config.seqlen / processes);
    if (needed + activations <= free) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrFormat(
        "--batch: %s sequences of %s tokens need at least %.1f GiB for what layers keep; %.1f GiB "
        "are free; give fewer and more --accumulate, a shorter --seqlen or --recompute, or "
        "--noplan to try it",
        Thousands(config.batch), Thousands(config.seqlen), activations / (1 << 30),
        (free - needed) / (1 << 30)));
  }
  return absl::ResourceExhaustedError(absl::StrFormat(
      "--model: %s parameters with a vocabulary of %s tokens need %.1f GiB for values, gradients "
      "and moments%s; %.1f GiB are free; give a smaller model, or --noplan to try it",
      Thousands(parameters), Thousands(config.model.vocab), needed / (1 << 30),
      ranks > 1 ? absl::StrCat(" of ", ranks, " ranks") : "", free / (1 << 30)));
}

absl::Status CheckMemory(TrainingSetup* setup) {
  if (!setup->config.plan) return absl::OkStatus();
  if (setup->config.device == DeviceType::kCpu) return CheckStateFits(*setup);
  const ScopedPhase phase("plan");
  return CheckRunFits(setup);
}

}  // namespace burst
