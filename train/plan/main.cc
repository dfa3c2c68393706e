// bazel run //train:plan: the memory and the time of a training step, without its GPUs.
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "burst/base/status.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "train/config/config.h"
#include "train/plan/fit.h"
#include "train/plan/gpu_models.h"
#include "train/plan/plan.h"

namespace burst {
namespace {

constexpr double kGiB = double{1 << 30};

struct PlanConfig {
  std::string gpus = "1xH200";
  int64_t gpus_per_node = 8;
  double memory = -1, links = -1, network = -1;
  bool fit = false;
  std::vector<int64_t> seqlens, counts;
  TrainConfig train;
};

constexpr int64_t kMostGpus = 256;  // each is a thread, with masks of its own

absl::StatusOr<int64_t> ParseCount(absl::string_view text) {
  int64_t number = 0;
  if (absl::SimpleAtoi(text, &number) && number >= 1) return number;
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is not a whole number of at least 1"));
}

// Everything that //train takes, but for what a plan has no use for.
OptionTable Options(PlanConfig* c) {
  constexpr OnResume kMayChange = OnResume::kMayChange;  // nothing is resumed here
  const OptionTable train = TrainOptions(&c->train);
  OptionTable t;
  t.Group("The GPUs");
  t.Add("gpus", &c->gpus, kMayChange,
        "How many, and which: 4xH200. Each is a rank. H100 and H200 are known.");
  t.Add("gpus_per_node", &c->gpus_per_node, kMayChange,
        "GPUs that fast links connect; others reach each other over the network.");
  t.Add("memory", &c->memory, kMayChange, "GiB that a GPU has for a program. -1: the model's own.");
  t.Add("links", &c->links, kMayChange,
        "GB/s that a GPU sends to others of its node, while it receives as many. -1: the model's.");
  t.Add("network", &c->network, kMayChange,
        "GB/s that a GPU sends to other nodes, while it receives as many. -1: 45.");
  t.Group("The question");
  t.Add("fit", &c->fit, kMayChange,
        "Chooses --zero, --recompute and --ffn_chunk, where they are not given, so that the step "
        "is the fastest one that fits.");
  t.AddList("seqlens", &c->seqlens, ParseCount, kMayChange,
            "A table over these lengths, in place of --seqlen.");
  t.AddList("counts", &c->counts, ParseCount, kMayChange,
            "A table over these numbers of GPUs, in place of that in --gpus.");
  t.Group("The step, as //train takes it");
  for (const char* name : {"model",           "window",         "dropout",      "data",
                           "tokenizer",       "packed",         "seqlen",       "batch",
                           "accumulate",      "precision",      "dp",           "sp",
                           "strategy",        "layout",         "ulysses",      "ring_backward",
                           "ring_grad_dtype", "ranks_per_node", "recompute",    "recompute_every",
                           "ffn_chunk",       "zero",           "deterministic"}) {
    t.AddShared(train, name);
  }
  return t;
}

// "4xH200"
absl::StatusOr<GpuModel> ReadGpus(const PlanConfig& c, int64_t* count) {
  const std::vector<std::string> parts = absl::StrSplit(c.gpus, absl::MaxSplits('x', 1));
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], count) || *count < 1) {
    return InvalidOption("gpus", c.gpus, " is no number of GPUs of a kind, such as 4xH200");
  }
  absl::StatusOr<GpuModel> gpu = FindGpuModel(parts[1]);
  if (!gpu.ok()) return InvalidOption("gpus", gpu.status().message());
  for (const auto& [name, value, unit, field] :
       {std::tuple("memory", c.memory, kGiB, &gpu->memory),
        std::tuple("links", c.links, 1e9, &gpu->links),
        std::tuple("network", c.network, 1e9, &gpu->network)}) {
    if (value != -1 && value <= 0) return InvalidOption(name, value, " must be above 0, or -1");
    if (value != -1) *field = value * unit;
  }
  if (c.gpus_per_node < 1) {
    return InvalidOption("gpus_per_node", c.gpus_per_node, " is too small; it must be at least 1");
  }
  return gpu;
}

absl::StatusOr<ResolvedConfig> Resolve(const PlanConfig& c, int64_t gpus, int64_t seqlen) {
  if (gpus > kMostGpus) {
    return InvalidOption("gpus", gpus, " are too many to simulate; at most ", kMostGpus);
  }
  TrainConfig train = c.train;
  train.device = DeviceChoice::kCuda;
  train.eval_every = 0;
  train.ranks = gpus;
  train.seqlen = seqlen;
  Launch launch;
  launch.gpus = static_cast<int>(gpus);
  return ResolveConfig(train, launch);
}

std::string Gib(int64_t bytes) { return absl::StrFormat("%.1f", bytes / kGiB); }

void PrintPlan(const StepPlan& plan, const GpuModel& gpu) {
  const auto row = [](const std::string& what, const std::string& value) {
    std::printf("  %-34s %s\n", what.c_str(), value.c_str());
  };
  std::printf("Memory of a GPU, GiB\n");
  row("parameters", Gib(plan.parameters));
  row("gradients", Gib(plan.gradients));
  row("optimizer", Gib(plan.optimizer));
  const int64_t kept = plan.parameters + plan.gradients + plan.optimizer;
  row("a step, beside them", Gib(plan.peak_bytes - kept));
  constexpr size_t kParts = 7;  // the largest
  for (size_t i = 0; i < std::min(kParts, plan.at_peak.size()); ++i) {
    const auto& [place, bytes] = plan.at_peak[i];
    if (place != "start") row(absl::StrCat("  of ", place), Gib(bytes));  // that is what is kept
  }
  row("peak", absl::StrCat(Gib(plan.peak_bytes), " of ", Gib(static_cast<int64_t>(gpu.memory)),
                           Fits(plan, gpu) ? "" : ": does not fit"));
  std::printf("Time of a step\n");
  row("seconds", absl::StrFormat("%.4g", plan.step_seconds));
  row("of them kernels", absl::StrFormat("%.4g", plan.kernel_seconds));
  for (size_t i = 0; i < std::min(kParts, plan.by_place.size()); ++i) {
    const auto& [place, seconds] = plan.by_place[i];
    row(absl::StrCat("  of ", place), absl::StrFormat("%.4g", seconds));
  }
  row("tokens/s a GPU", absl::StrFormat("%.0f", plan.tokens_per_second));
}

absl::Status Run(const PlanConfig& c, const OptionTable& options) {
  int64_t count = 0;
  BURST_ASSIGN_OR_RETURN(const GpuModel gpu, ReadGpus(c, &count));
  const int per_node = static_cast<int>(c.gpus_per_node);
  const bool is_table = !c.seqlens.empty() || !c.counts.empty();
  const std::vector<int64_t> seqlens =
      c.seqlens.empty() ? std::vector<int64_t>{c.train.seqlen} : c.seqlens;
  const std::vector<int64_t> counts = c.counts.empty() ? std::vector<int64_t>{count} : c.counts;
  Choices choices;
  choices.zero = c.fit && !options.Given("zero");
  choices.recompute = c.fit && !options.Given("recompute") && !options.Given("recompute_every");
  choices.ffn_chunk = c.fit && !options.Given("ffn_chunk");
  if (is_table) {
    std::printf("%10s %6s %10s %10s %15s\n", "tokens", "GPUs", "GiB a GPU", "seconds",
                "tokens/s a GPU");
  }
  for (const int64_t seqlen : seqlens) {
    for (const int64_t gpus : counts) {
      BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, Resolve(c, gpus, seqlen));
      BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PreparePlan(config));
      BURST_ASSIGN_OR_RETURN(const FittedPlan fitted, FitStep(setup, gpu, per_node, choices));
      const StepPlan& plan = fitted.plan;
      if (is_table) {
        std::printf("%10lld %6lld %10s %10.4g %15.0f  %s%s\n", static_cast<long long>(seqlen),
                    static_cast<long long>(gpus), Gib(plan.peak_bytes).c_str(), plan.step_seconds,
                    plan.tokens_per_second, Fits(plan, gpu) ? "" : "does not fit ",
                    fitted.options.c_str());
        std::fflush(stdout);
        continue;
      }
      PrintPlan(plan, gpu);
      BURST_RETURN_IF_ERROR(CheckFits(setup, plan, gpu, per_node));
      if (!fitted.options.empty()) std::printf("With %s\n", fitted.options.c_str());
    }
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  PlanConfig config;
  OptionTable options = Options(&config);
  const std::string help = options.Help(
      "Tells the memory and the time of a training step on GPUs that need not be there.\n\n"
      "  bazel run //train:plan -- --model=llama_1b --seqlen=131072 --gpus=4xH200 --fit\n");
  if (PrintHelpOrVersion(argc, argv, help)) return 0;
  const absl::Status usage = options.ParseArguments(argc, argv);
  if (!usage.ok()) return RefuseUsage(usage, ProcessRank());
  const absl::Status status = Run(config, options);
  return status.ok() ? 0 : ExitCode(status, kExitFailure);
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
