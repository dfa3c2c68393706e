// bazel run //train:generate: text from a checkpoint.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/exit_code.h"
#include "burst/cli/files.h"
#include "burst/cli/flags.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "train/checkpoint/checkpoint.h"
#include "train/generate/generate.h"
#include "train/report/run_folder.h"

ABSL_FLAG(std::string, checkpoint, "", "A checkpoint, or the folder of the run that left it.");
ABSL_FLAG(std::string, prompt, "", "What the text begins with. Without it: a line break.");
ABSL_FLAG(int64_t, tokens, 500, "Tokens to generate.");
ABSL_FLAG(double, temperature, 0.8, "Above 1: more surprising, below: less; 0: the likeliest.");
ABSL_FLAG(int64_t, top_k, 0, "Choose among the k likeliest tokens; 0: among all.");
ABSL_FLAG(int64_t, seed, 1, "Another seed, another text.");
ABSL_FLAG(std::string, device, "auto", "cpu, cuda, or auto: cuda where a GPU is found.");

namespace burst {
namespace {

const std::vector<FlagGroup>& Groups() {
  static const auto* groups = new std::vector<FlagGroup>{
      {"Options", {"checkpoint", "prompt", "tokens", "temperature", "top_k", "seed", "device"}}};
  return *groups;
}

absl::Status ParseFlags(int argc, char** argv) {
  BURST_RETURN_IF_ERROR(ParseArguments(Groups(), argc, argv));
  const auto check = [](bool valid, const char* option, const char* what) {
    if (valid) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("--", option, ": ", what));
  };
  BURST_RETURN_IF_ERROR(check(!absl::GetFlag(FLAGS_checkpoint).empty(), "checkpoint",
                              "give a checkpoint or the folder of a run"));
  BURST_RETURN_IF_ERROR(check(absl::GetFlag(FLAGS_tokens) >= 0, "tokens", "must be at least 0"));
  BURST_RETURN_IF_ERROR(
      check(absl::GetFlag(FLAGS_temperature) >= 0, "temperature", "must be at least 0"));
  BURST_RETURN_IF_ERROR(check(absl::GetFlag(FLAGS_top_k) >= 0, "top_k", "must be at least 0"));
  BURST_RETURN_IF_ERROR(check(absl::GetFlag(FLAGS_seed) >= 0, "seed", "must be at least 0"));
  const std::string device = absl::GetFlag(FLAGS_device);
  BURST_RETURN_IF_ERROR(check(device == "auto" || device == "cpu" || device == "cuda", "device",
                              "must be auto, cpu or cuda"));
  return check(device != "cuda" || CudaDeviceCount() > 0, "device",
               "cuda needs an NVIDIA GPU and a build with CUDA; none was found");
}

absl::Status Run() {
  std::string path = ResolvePath(absl::GetFlag(FLAGS_checkpoint));
  if (std::filesystem::is_directory(path)) path = CheckpointPath(path);
  const absl::StatusOr<CheckpointInfo> found = ReadCheckpointInfo(path);
  if (!found.ok()) {
    return absl::Status(found.status().code(),
                        absl::StrCat("--checkpoint: ", found.status().message()));
  }
  const CheckpointInfo& info = *found;
  if (!info.tokenizer.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--checkpoint: ", path,
                     ": trained on .bin shards, without a tokenizer to write text with"));
  }
  const bool cuda = absl::GetFlag(FLAGS_device) != "cpu" && CudaDeviceCount() > 0;
  const DeviceType device = cuda ? DeviceType::kCuda : DeviceType::kCpu;
  BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Transformer> model,
                         Transformer::Create(info.model, DType::kFloat32, /*seed=*/0, device));
  BURST_RETURN_IF_ERROR(LoadCheckpoint(path, &model->parameters(), nullptr));

  const std::string prompt = absl::GetFlag(FLAGS_prompt);
  absl::StatusOr<std::vector<int32_t>> tokens = EncodePrompt(*info.tokenizer, prompt);
  if (!tokens.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--prompt: ", tokens.status().message()));
  }
  GenerationOptions options;
  options.sampling = {absl::GetFlag(FLAGS_temperature), absl::GetFlag(FLAGS_top_k),
                      static_cast<uint64_t>(absl::GetFlag(FLAGS_seed))};
  options.tokens = absl::GetFlag(FLAGS_tokens);
  options.context = info.seqlen;
  options.window = info.window;
  const auto print = [](absl::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  print(prompt);
  BURST_RETURN_IF_ERROR(Generate(*model, *info.tokenizer, *tokens, options, print));
  print("\n");
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  if (WantsHelp(argc, argv)) {
    std::fputs(HelpText("Generates text from a checkpoint of //train.\n\n"
                        "  bazel run //train:generate -- --checkpoint=runs/NAME --prompt='And'\n",
                        Groups())
                   .c_str(),
               stdout);
    return 0;
  }
  const absl::Status usage = ParseFlags(argc, argv);
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  const ScopedThreadPool pool(NumCores());
  const absl::Status status = Run();
  return status.ok() ? 0 : ExitCode(status, kExitFailure);
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
