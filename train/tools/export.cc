// bazel run //train:export: writes a checkpoint as a Hugging Face directory.
#include "train/huggingface/export.h"

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "train/checkpoint/kept_checkpoints.h"

namespace burst {
namespace {

int Main(int argc, char** argv) {
  std::string checkpoint, out;
  int64_t file_mb = 5000;
  ExportOptions how;
  OptionTable options;
  options.Group("Options");
  options.Add("checkpoint", &checkpoint)
      .Help(
          "Export a checkpoint, or the newest one of the folder of a run or an import; "
          "\"--checkpoint\" "
          "may be left out.");
  options.Add("out", &out).Help("Make this Hugging Face directory.");
  options.Add("dtype", &how.dtype, kWeightDTypes)
      .Help("Write weights as float32, bfloat16 or float16. auto: as imported, else float32.");
  options.Add("ema", &how.average)
      .Help("Export the average of the weights that a run with --ema keeps.");
  options.Add("file_mb", &file_mb)
      .Min(1)
      .Max(1e9)
      .Unit("MB")
      .Help("Put at most N MB of tensors into a file, and larger models into several.");
  const std::string help = options.Help(
      "Makes a Hugging Face directory of a checkpoint, which transformers loads.\n\n"
      "  bazel run //train:export -- runs/NAME --out=DIRECTORY\n");
  if (PrintHelpOrVersion(argc, argv, help)) return ExitWithOutput();
  if (argc > 1 && argv[1][0] != '-') {
    checkpoint = argv[1];
    --argc, ++argv;
  }
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok() && checkpoint.empty()) {
    usage = InvalidOption("checkpoint", "give a checkpoint or the folder of a run");
  }
  if (usage.ok() && out.empty()) usage = InvalidOption("out", "give the directory to make");
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  const ScopedThreadPool pool(NumCores());
  std::string path = ResolvePath(checkpoint);
  std::error_code error;  // opening reports a path that cannot be followed
  if (std::filesystem::is_directory(path, error)) path = CheckpointPath(path);
  how.file_bytes = file_mb * 1'000'000;
  const absl::Status status = ExportHuggingFace(path, ResolvePath(out), how);
  if (!status.ok()) return ExitCode(status, kExitFailure);
  std::printf("%s holds the model\n", out.c_str());
  return ExitWithOutput();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
