// bazel run //train:import: turns a Hugging Face directory into a folder with a checkpoint.
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "train/config/config.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

int Main(int argc, char** argv) {
  std::string directory, out;
  TrainConfig train;  // options that //train has, too
  OptionTable options;
  options.Group("Options");
  options.Add("directory", &directory)
      .Help("Import this Hugging Face directory; \"--directory\" may be left out.");
  options.Add("out", &out).Help("Make this folder.");
  options.AddShared(TrainOptions(&train), "ignore_fields");
  const std::string help = options.Help(
      "Makes a checkpoint of a Hugging Face directory (config.json and *.safetensors of a Llama,\n"
      "Mistral, Phi-3, Qwen2, Qwen3, OLMo 2, Gemma or GPT-2), with float32 weights.\n\n"
      "  bazel run //train:import -- DIRECTORY --out=FOLDER\n"
      "  bazel run //train -- --model=FOLDER          a run that starts from it\n");
  if (PrintHelpOrVersion(argc, argv, help)) return ExitWithOutput();
  if (argc > 1 && argv[1][0] != '-') {
    directory = argv[1];
    --argc, ++argv;
  }
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok() && directory.empty()) usage = InvalidOption("directory", "give a folder");
  if (usage.ok() && out.empty()) usage = InvalidOption("out", "give the folder to make");
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  const ScopedThreadPool pool(NumCores());
  const absl::Status status =
      ImportHuggingFace(ResolvePath(directory), ResolvePath(out), IgnoredFields(train));
  if (!status.ok()) return ExitCode(status, kExitFailure);
  std::printf("%s holds the model; train with --model=%s\n", out.c_str(), out.c_str());
  return ExitWithOutput();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
