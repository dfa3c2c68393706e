// bazel run //train:plan: prints the memory and the time of a training step, without its GPUs.
#include "train/plan/plan.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/line_plot.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "train/plan/fit.h"
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
  row("a step, in addition", Gib(plan.peak_bytes - kept));
  constexpr size_t kParts = 7;  // number of parts that are printed, the largest ones
  for (size_t i = 0; i < std::min(kParts, plan.at_peak.size()); ++i) {
    const auto& [place, bytes] = plan.at_peak[i];
    // The start is what is kept.
    if (place != "start") row(absl::StrCat("  of ", place), Gib(bytes));
  }
  row("peak", absl::StrCat(Gib(plan.peak_bytes), " of ", Gib(static_cast<int64_t>(gpu.memory)),
                           Fits(plan, gpu) ? "" : ": does not fit"));
  if (plan.host_bytes > 0) row("of the host's memory", Gib(plan.host_bytes));
  std::printf("Time of a step\n");
  row("seconds", absl::StrFormat("%.4g", plan.step_seconds));
  row("of them kernels", absl::StrFormat("%.4g", plan.kernel_seconds));
  for (size_t i = 0; i < std::min(kParts, plan.by_place.size()); ++i) {
    const auto& [place, seconds] = plan.by_place[i];
    row(absl::StrCat("  of ", place), absl::StrFormat("%.4g", seconds));
  }
  if (plan.pipeline_bubble.has_value()) {
    row("bubble", absl::StrFormat("%.1f%% of what stages compute", 100 * *plan.pipeline_bubble));
  }
  row("tokens/s a GPU", absl::StrFormat("%.0f", plan.tokens_per_second));
}

// A line of the table.
struct Row {
  int64_t seqlen, gpus;
  FittedPlan fitted;
  bool fits;
};

void PrintRow(const Row& row) {
  const StepPlan& plan = row.fitted.plan;
  std::printf("%10lld %6lld %10s %10.4g %15.0f  %s%s\n", static_cast<long long>(row.seqlen),
              static_cast<long long>(row.gpus), Gib(plan.peak_bytes).c_str(), plan.step_seconds,
              plan.tokens_per_second, row.fits ? "" : "does not fit ", row.fitted.options.c_str());
}

// Draws the seconds of a step that fits over the length, with a curve for each number of GPUs.
absl::Status Draw(const std::vector<Row>& rows, const std::string& gpu, const std::string& path) {
  LinePlot plot;
  plot.title = absl::StrCat("Seconds of a step on ", gpu, ", where it fits");
  plot.x_label = "tokens";
  plot.y_label = "seconds";
  plot.log_x = true;
  plot.from_zero = true;
  std::map<int64_t, Curve> curves;
  for (const Row& row : rows) {
    if (!row.fits) continue;
    curves[row.gpus].push_back({static_cast<double>(row.seqlen), row.fitted.plan.step_seconds});
  }
  for (auto& [gpus, points] : curves) {
    std::sort(points.begin(), points.end(), [](auto a, auto b) { return a.x < b.x; });
    PlotSeries series;
    series.color = static_cast<int>(plot.series.size()) % kPlotColors;
    series.label = absl::StrCat(gpus, gpus == 1 ? " GPU" : " GPUs");
    series.points = std::move(points);
    series.dots = true;
    plot.series.push_back(std::move(series));
  }
  if (plot.series.empty()) return InvalidOption("plot", "there is nothing to draw: no step fits");
  const absl::Status written = WriteFileAtomically(path, LinePlotSvg(plot));
  return written.ok() ? written : InvalidOption("plot", written.message());
}

// The runs to plan.
struct Question {
  GpuModel gpu;
  int gpus_per_node = 0;
  MayChoose may_choose;
  bool is_table = false;
  // One step, or those of a table; each with its meshes.
  std::vector<std::vector<MeshChoice>> steps;
  std::string plot;
};

absl::StatusOr<Question> ReadOptions(const PlanOptions& c, const OptionTable& options) {
  Question question;
  int64_t count = 0;
  BURST_ASSIGN_OR_RETURN(question.gpu, GpuOf(c, &count));
  question.gpus_per_node = static_cast<int>(c.gpus_per_node);
  question.may_choose = [&](absl::string_view name) { return c.fit && !options.Named(name); };
  const auto may_choose_all = [&](std::initializer_list<absl::string_view> names) {
    return std::all_of(names.begin(), names.end(), question.may_choose);
  };
  if (c.fit && c.train.exact) {
    return InvalidOption("fit", "is not for --exact, whose results its choices would change");
  }
  question.is_table = !c.seqlens.empty() || !c.counts.empty();
  if (!question.is_table && !c.plot.empty()) {
    return InvalidOption("plot", "draws a table; give --seqlens");
  }
  question.plot = ResolvePath(c.plot);
  if (!c.plot.empty()) {
    BURST_RETURN_IF_ERROR(CheckReplaceable("plot", question.plot, "<svg", "an SVG"));
  }
  const std::vector<int64_t> seqlen = {c.train.seqlen}, gpus = {count};
  for (const int64_t tokens : c.seqlens.empty() ? seqlen : c.seqlens) {
    for (const int64_t number : c.counts.empty() ? gpus : c.counts) {
      const bool mesh = may_choose_all({"dp", "sp", "tp", "pp", "pp_chunks"});
      const bool strategy =
          may_choose_all({"strategy", "ulysses", "ring_backward", "ranks_per_node"});
      BURST_ASSIGN_OR_RETURN(auto step, MeshesOf(c, number, tokens, mesh, strategy));
      question.steps.push_back(std::move(step));
    }
  }
  return question;
}

// Tells on the standard error output which mesh a long search has come to.
class Progress {
 public:
  void Report(const std::string& mesh, size_t place, size_t meshes) const {
    constexpr std::chrono::seconds kQuiet{5};
    if (std::chrono::steady_clock::now() - start_ < kQuiet) return;
    std::fprintf(stderr, "planning mesh %zu of %zu: %s\n", place, meshes, mesh.c_str());
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

absl::Status Answer(const Question& question) {
  const Progress progress;
  const GpuModel& gpu = question.gpu;
  std::vector<Row> rows;
  if (question.is_table) {
    std::printf("%10s %6s %10s %10s %15s\n", "tokens", "GPUs", "GiB a GPU", "seconds",
                "tokens/s a GPU");
  }
  for (const std::vector<MeshChoice>& step : question.steps) {
    std::optional<TrainingSetup> setup;
    FittedPlan fitted;
    for (const MeshChoice& choice : step) {
      progress.Report(choice.options, &choice - step.data() + 1, step.size());
      BURST_ASSIGN_OR_RETURN(TrainingSetup other_setup, PreparePlan(choice.config));
      BURST_ASSIGN_OR_RETURN(
          FittedPlan other, FitStep(other_setup, gpu, question.gpus_per_node, question.may_choose));
      if (setup.has_value() && !IsBetter(other.plan, fitted.plan, gpu)) continue;
      if (!choice.options.empty()) {
        other.options =
            absl::StrCat(choice.options, other.options.empty() ? "" : " ", other.options);
      }
      fitted = std::move(other);
      setup = std::move(other_setup);
    }
    const bool fits = Fits(fitted.plan, gpu);
    if (question.is_table) {
      const ResolvedConfig& config = setup->config;
      rows.push_back({config.seqlen, config.ranks, std::move(fitted), fits});
      PrintRow(rows.back());
      BURST_RETURN_IF_ERROR(FlushOutput());
      continue;
    }
    PrintPlan(fitted.plan, gpu);
    BURST_RETURN_IF_ERROR(CheckFits(*setup, fitted.plan, gpu, question.gpus_per_node));
    if (!fitted.options.empty()) std::printf("With %s\n", fitted.options.c_str());
  }
  return question.plot.empty() ? absl::OkStatus() : Draw(rows, gpu.name, question.plot);
}

int Main(int argc, char** argv) {
  PlanOptions config;
  OptionTable options = PlanOptionTable(&config);
  const std::string help = options.Help(
      "Tells the memory and the time of a training step on GPUs that need not be there.\n\n"
      "  bazel run //train:plan -- --model=llama_1b --seqlen=131072 --gpus=4xH200 --fit\n");
  if (PrintHelpOrVersion(argc, argv, help)) return ExitWithOutput();
  const absl::Status usage = options.ParseArguments(argc, argv);
  if (!usage.ok()) return RefuseUsage(usage, ProcessRank());
  const absl::StatusOr<Question> question = ReadOptions(config, options);
  if (!question.ok()) return RefuseUsage(question.status(), ProcessRank());
  const absl::Status status = Answer(*question);
  return status.ok() ? ExitWithOutput() : ExitCode(status, kExitFailure);
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
