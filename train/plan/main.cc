// bazel run //train:plan: the memory and the time of a training step, without its GPUs.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "train/plan/fit.h"
#include "train/plan/plan.h"
#include "train/plan/plan_options.h"

namespace burst {
namespace {

constexpr double kGiB = double{1 << 30};

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

absl::Status Run(const PlanOptions& c, const OptionTable& options) {
  int64_t count = 0;
  BURST_ASSIGN_OR_RETURN(const GpuModel gpu, GpuOf(c, &count));
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
      BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, ConfigOf(c, gpus, seqlen));
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
  PlanOptions config;
  OptionTable options = PlanOptionTable(&config);
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
