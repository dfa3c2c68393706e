// bazel run //train:generate: text from a checkpoint.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "burst/device/device.h"
#include "model/transformer.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/config/config.h"
#include "train/data/tokenizer.h"
#include "train/generate/generate.h"

namespace burst {
namespace {

struct GenerateConfig {
  std::string checkpoint, prompt, tokenizer;
  int64_t tokens = 500;
  double temperature = 0.8;
  int64_t top_k = 0;
  int64_t seed = 1;
  TrainConfig train;  // the options that are those of //train
};

OptionTable Options(GenerateConfig* c) {
  constexpr OnResume kMayChange = OnResume::kMayChange;  // nothing is resumed here
  OptionTable t;
  t.Group("Options");
  t.Add("checkpoint", &c->checkpoint, kMayChange,
        "A checkpoint, or the folder of the run that left it: then its newest one.");
  t.Add("prompt", &c->prompt, kMayChange, "What the text begins with. Without it: a line break.");
  t.Add(
      "tokenizer", &c->tokenizer, kMayChange,
      "For a checkpoint without one: tokenizer.model, tokenizer.json, or a folder with one of them "
      "(an imported model's: huggingface in the run's folder) or with GPT-2's encoder.json and "
      "vocab.bpe.");
  t.Add("tokens", &c->tokens, kMayChange, "Tokens to generate.");
  t.Add("temperature", &c->temperature, kMayChange,
        "Above 1: more surprising, below: less; 0: the likeliest.");
  t.Add("top_k", &c->top_k, kMayChange, "Choose among the k likeliest tokens; 0: among all.");
  t.Add("seed", &c->seed, kMayChange, "Another seed, another text.");
  t.AddShared(TrainOptions(&c->train), "device");
  return t;
}

absl::Status Check(const GenerateConfig& c) {
  if (c.checkpoint.empty()) {
    return InvalidOption("checkpoint", "give a checkpoint or the folder of a run");
  }
  if (c.tokens < 0) return InvalidOption("tokens", "must be at least 0");
  if (c.temperature < 0) return InvalidOption("temperature", "must be at least 0");
  if (c.top_k < 0) return InvalidOption("top_k", "must be at least 0");
  if (c.seed < 0) return InvalidOption("seed", "must be at least 0");
  return ResolveDevice(c.train.device, CudaDeviceCount()).status();
}

// The checkpoint's, or the one that is given.
absl::StatusOr<Tokenizer> FindTokenizer(const GenerateConfig& c, const std::string& path,
                                        const CheckpointInfo& info) {
  if (c.tokenizer.empty()) {
    if (info.tokenizer.has_value()) return *info.tokenizer;
    return absl::InvalidArgumentError(absl::StrCat(
        "--checkpoint: ", path, " holds no tokenizer to write text with; give --tokenizer"));
  }
  absl::StatusOr<Tokenizer> given = Tokenizer::Load(ResolvePath(c.tokenizer));
  if (!given.ok()) return InvalidOption("tokenizer", given.status().message());
  if (given->vocab() <= info.model.vocab) return given;
  return InvalidOption("tokenizer", "it has ", given->vocab(), " tokens, more than the ",
                       info.model.vocab, " of the model");
}

absl::Status Run(const GenerateConfig& c) {
  std::string path = ResolvePath(c.checkpoint);
  std::error_code error;  // a path that cannot be followed is told of when it is opened
  if (std::filesystem::is_directory(path, error)) path = CheckpointPath(path);
  const auto unusable = [&](const absl::Status& status) {
    return WithAnotherCheckpoint(
        absl::Status(status.code(), absl::StrCat("--checkpoint: ", status.message())), path,
        "$NAME beside it, of step $STEP, is good");
  };
  const absl::StatusOr<CheckpointInfo> found = ReadCheckpointInfo(path);
  if (!found.ok()) return unusable(found.status());
  const CheckpointInfo& info = *found;
  BURST_ASSIGN_OR_RETURN(const Tokenizer tokenizer, FindTokenizer(c, path, info));
  BURST_ASSIGN_OR_RETURN(const DeviceType device, ResolveDevice(c.train.device, CudaDeviceCount()));
  BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Transformer> model,
                         Transformer::Create(info.model, DType::kFloat32, /*seed=*/0, device));
  const absl::Status loaded = LoadCheckpoint(path, &model->parameters(), nullptr);
  if (!loaded.ok()) return unusable(loaded);

  absl::StatusOr<std::vector<int32_t>> tokens = EncodePrompt(tokenizer, c.prompt);
  if (!tokens.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--prompt: ", tokens.status().message()));
  }
  GenerationOptions options;
  options.sampling = {c.temperature, c.top_k, static_cast<uint64_t>(c.seed)};
  options.tokens = c.tokens;
  options.context = info.seqlen;
  options.window = info.window;
  const auto print = [](absl::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;
  };
  print(c.prompt);
  BURST_RETURN_IF_ERROR(Generate(*model, tokenizer, *tokens, options, print));
  print("\n");
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  GenerateConfig config;
  OptionTable options = Options(&config);
  const std::string help = options.Help(
      "Generates text from a checkpoint of //train.\n\n"
      "  bazel run //train:generate -- --checkpoint=runs/NAME --prompt='And'\n");
  if (PrintHelpOrVersion(argc, argv, help)) return 0;
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok()) usage = Check(config);
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  const ScopedThreadPool pool(NumCores());
  const absl::Status status = Run(config);
  return status.ok() ? 0 : ExitCode(status, kExitFailure);
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
