// bazel run //benchmarks:scaling: attention and whole models over rings of ranks, in tables.
// benchmarks/README.md has a command for every experiment.
#include <cstdio>
#include <ctime>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "benchmarks/scaling/attention_experiment.h"
#include "benchmarks/scaling/error_experiment.h"
#include "benchmarks/scaling/model_experiments.h"
#include "benchmarks/scaling/options.h"
#include "benchmarks/scaling/report.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "burst/comm/agreement.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/launched_ranks.h"
#include "burst/device/device.h"

namespace burst {
namespace {

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "CPU";
}

std::string Machine(const ScalingOptions& options) {
  const std::string processes =
      options.processes == nullptr
          ? ""
          : absl::StrCat(", ", options.processes->world_size(), " processes");
  if (options.problem.device == DeviceType::kCpu) {
    return absl::StrFormat("%d cores of %s, %d threads a rank%s", NumCores(), CpuName(),
                           options.threads, processes);
  }
  return absl::StrFormat("%d x %s%s", CudaDeviceCount(), CudaDeviceName(0), processes);
}

std::string Today() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

// Adds the options of memory that are given, except --recompute, which a case has.
void AddMemoryOptions(TrainConfig train, ReportRow* about) {
  TrainConfig defaults;
  const OptionTable given = TrainOptions(&train), table = TrainOptions(&defaults);
  for (const Option& option : given.options()) {
    const bool is_given = option.get() != table[option.name].get();
    if (option.group != "memory" || option.name == "recompute" || !is_given) continue;
    (*about)[option.name] = option.get();
  }
}

// Returns the columns that all rows have in common.
ReportRow About(const ScalingOptions& options) {
  const AttentionProblem& problem = options.problem;
  ReportRow about;
  about["experiment"] = Name(options.experiment);
  about["date"] = Today();
  about["machine"] = Machine(options);
  about["layout"] = Name(problem.layout);
  if (problem.ring_grad_dtype != RingGradDType::kFp32) {
    about["ring_grad_dtype"] = Name(problem.ring_grad_dtype);
  }
  if (problem.ranks_per_node > 0) about["ranks_per_node"] = problem.ranks_per_node;
  switch (options.experiment) {
    case Experiment::kAttention:
    case Experiment::kError:
      about["heads"] = problem.heads;
      about["kv_heads"] = problem.kv_heads;
      about["head_dim"] = problem.head_dim;
      about["mask"] = problem.causal ? "causal" : "full";
      about["tiles"] = problem.tiles ? "on" : "off";
      about["dtype"] = Name(problem.dtype);
      break;
    case Experiment::kTraining:
      about["steps"] = options.train.steps;
      about["data"] = options.train.data;
      about["model"] = options.train.model;
      AddMemoryOptions(options.train, &about);
      break;
    case Experiment::kGeneration:
      about["generated"] = options.tokens;
      about["model"] = options.train.model;
      break;
    case Experiment::kPrefill:
      about["model"] = options.train.model;
      break;
  }
  return about;
}

std::string Title(const ReportRow& about) {
  std::string title;
  for (const auto& item : about.items()) {
    const std::string value =
        item.value().is_string() ? item.value().get<std::string>() : item.value().dump();
    const bool obvious =
        item.key() == "experiment" || item.key() == "date" || item.key() == "machine";
    absl::StrAppend(&title, title.empty() ? "" : ", ", obvious ? "" : item.key() + " ", value);
  }
  return title;
}

// Says how an experiment is run, printed and drawn.
struct Plan {
  std::vector<ReportColumn> columns;
  const char* y_key;
  const char* y_label;
  double y_scale;
  std::function<absl::StatusOr<std::vector<ReportRow>>(
      const ScalingOptions&, const std::function<void(const ReportRow&)>&)>
      run;
};

Plan PlanOf(const ScalingOptions& options) {
  const DeviceType device = options.problem.device;
  switch (options.experiment) {
    case Experiment::kAttention:
      return {AttentionColumns(options), "forward_backward_gflops_per_rank",
              device == DeviceType::kCuda ? "TFLOP/s of a rank, forward and backward"
                                          : "GFLOP/s of a rank, forward and backward",
              device == DeviceType::kCuda ? 1e-3 : 1, RunAttentionExperiment};
    case Experiment::kError:
      return {ErrorColumns(options), "dq", "relative error of dQ, in 1e-9", 1e9,
              RunErrorExperiment};
    case Experiment::kPrefill:
      return {PrefillColumns(), "latency_ms", "time to first token, ms", 1, RunPrefillExperiment};
    case Experiment::kGeneration:
      return {GenerationColumns(), "token_ms", "a token, ms", 1, RunGenerationExperiment};
    case Experiment::kTraining:
      break;
  }
  return {TrainingColumns(), "step_ms", "step, ms", 1, RunTrainingExperiment};
}

// Runs the part of a process that prints nothing: the first process speaks for it.
absl::Status RunSilently(const ScalingOptions& options) {
  return PlanOf(options).run(options, [](const ReportRow&) {}).status();
}

absl::Status Run(const ScalingOptions& options) {
  BURST_RETURN_IF_ERROR(MakeFolder(options.out));  // an error must come before hours of work
  const Plan plan = PlanOf(options);
  const ReportRow about = About(options);
  std::printf("%s\n\n%s", Title(about).c_str(), TableHeader(plan.columns).c_str());
  std::fflush(stdout);
  BURST_ASSIGN_OR_RETURN(const std::vector<ReportRow> rows,
                         plan.run(options, [&](const ReportRow& row) {
                           std::printf("%s", TableLine(row, plan.columns).c_str());
                           std::fflush(stdout);
                         }));
  std::vector<std::string> x_keys = {"seqlen", "batch", "ranks"};
  if (options.tile_keys[0] != 0) x_keys.push_back("tile_keys");
  LinePlot plot = PlotOf(rows, x_keys, plan.y_key, plan.y_scale);
  plot.title = absl::StrCat(Name(options.experiment), ": ", Machine(options));
  plot.y_label = plan.y_label;
  const std::string name = Name(options.experiment);
  BURST_RETURN_IF_ERROR(WriteReport(options.out, name, about, rows, plot));
  std::printf("\n%s.csv, .json and .svg are in %s\n", name.c_str(), options.out.c_str());
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  if (PrintHelpOrVersion(argc, argv, ScalingHelp())) return ExitWithOutput();
  absl::StatusOr<ScalingOptions> options = ScalingOptionsFromArguments(argc, argv, DetectLaunch());
  absl::Status usage = options.status();
  if (usage.ok()) usage = CheckModelExperiment(*options);
  if (!usage.ok()) return RefuseUsage(usage, ProcessRank());
  const auto processes = LaunchedRanks::Connect(options->problem.device);
  if (!processes.ok()) return ExitCode(processes.status(), kExitFailure);
  if (*processes == nullptr) {
    const absl::Status status = Run(*options);
    return status.ok() ? 0 : ExitCode(status, kExitFailure);
  }
  Communicator& comm = (*processes)->comm();
  options->processes = &comm;
  absl::Status status = CheckAgreement(&comm, options->agreed);
  if (status.ok()) status = comm.rank() == 0 ? Run(*options) : RunSilently(*options);
  if (!status.ok()) comm.Abort(status);  // does not return
  return 0;
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
