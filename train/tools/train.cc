// bazel run //train: options -> TrainConfig -> ResolvedConfig -> ranks -> Trainer.
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "burst/comm/launch/process_launch.h"
#include "train/config/config.h"
#include "train/plan/check_run.h"
#include "train/run/launch.h"

namespace burst {
namespace {

int Main(int argc, char** argv) {
  if (PrintHelpOrVersion(argc, argv, TrainHelp())) return ExitWithOutput();
  InstallInterruptHandler(ProcessRank());
  const absl::StatusOr<TrainConfig> options = TrainConfigFromArguments(argc, argv);
  if (!options.ok()) return RefuseUsage(options.status(), ProcessRank());

  const absl::StatusOr<ResolvedConfig> config = ResolveConfig(*options, DetectLaunch());
  if (!config.ok()) return RefuseUsage(config.status(), ProcessRank());

  const absl::Status status = RunTraining(*config, CheckMemory);
  if (absl::IsCancelled(status)) LetOthersReport();
  if (!status.ok()) return ExitCode(status, kExitFailure);
  return InterruptSignal() == 0 ? 0 : 128 + InterruptSignal();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
