// bazel run //train:generate: generates text from a checkpoint or a Hugging Face directory.
#include "train/generate/generate.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "burst/attention/burst_attention.h"
#include "burst/base/check.h"
#include "burst/base/enum_names.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "burst/cli/text.h"
#include "burst/comm/agreement.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/launched_ranks.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "model/ops/cuda/matmul.h"
#include "model/transformer.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/config/config.h"
#include "train/data/tokenizer.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

constexpr int64_t kFfnChunk = 8192;  // tokens

// Whether the token that the tokenizer puts before a text (BOS) comes before the prompt.
enum class Bos { kNo, kYes, kAuto };
constexpr EnumName<Bos> kBos[] = {{Bos::kNo, "false"}, {Bos::kYes, "true"}, {Bos::kAuto, "auto"}};
const char* Name(Bos bos) { return NameOf(bos, kBos); }
absl::StatusOr<Bos> ParseBos(absl::string_view text) { return ParseName(text, kBos); }

struct GenerateConfig {
  std::string checkpoint, prompt, prompt_file, tokenizer;
  Bos bos = Bos::kAuto;
  int64_t tokens = 500;
  double temperature = 0.8;
  int64_t top_k = 0;
  double top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t seed = 1;
  int64_t ranks = -1;
  TrainConfig train;  // options that //train has, too
};

OptionTable Options(GenerateConfig* c) {
  OptionTable t;
  t.Group("Options");
  t.Add("checkpoint", &c->checkpoint)
      .Help(
          "Load a checkpoint, the newest one of the folder of a run, or a Hugging Face directory.");
  t.Add("prompt", &c->prompt)
      .Help("Begin the text with this. Empty: with BOS or the end-of-text token, if there is one.");
  t.Add("prompt_file", &c->prompt_file)
      .Help("Read the prompt from a file; -: from standard input.");
  t.AddSwitch("bos", &c->bos, ParseBos)
      .Help(
          "Put tokens such as <s> before the prompt, as the tokenizer does. auto: as transformers "
          "does, or as the documents of a run begin.");
  t.Add("tokenizer", &c->tokenizer)
      .Help(
          "Read tokenizer.model, tokenizer.json, or their folder (or GPT-2's encoder.json and "
          "vocab.bpe), for a checkpoint without one.");
  t.Add("tokens", &c->tokens).Min(0).Help("Generate N tokens.");
  t.Add("temperature", &c->temperature)
      .Min(0)
      .Help("Choose likelier tokens below 1, less likely ones above. 0: the likeliest.");
  t.Add("top_k", &c->top_k).Min(0).Help("Choose among the N likeliest tokens. 0: among all.");
  t.Add("top_p", &c->top_p)
      .Above(0)
      .Max(1)
      .Help("Choose among the likeliest tokens whose probabilities sum to P. 1: among all.");
  t.Add("min_p", &c->min_p)
      .Min(0)
      .Max(1)
      .Help("Choose among tokens with at least P of the likeliest one's probability. 0: all.");
  t.Add("repetition_penalty", &c->repetition_penalty)
      .Above(0)
      .Max(1e6)
      .Help("Make tokens of the text less likely above 1, likelier below. 1: neither.");
  t.Add("seed", &c->seed).Min(0).Help("Choose another text with another seed.");
  t.Add("ranks", &c->ranks)
      .Min(1)
      .Or(-1)
      .Help(
          "Spread tokens, keys and values over N threads or GPUs, each with the whole model. -1: "
          "the processes of a launcher, else 1.");
  t.AddShared(TrainOptions(&c->train), "ignore_fields");
  t.AddShared(TrainOptions(&c->train), "layout");
  t.AddShared(TrainOptions(&c->train), "device");
  t.AddShared(TrainOptions(&c->train), "precision");
  return t;
}

absl::Status Check(const GenerateConfig& c) {
  if (c.checkpoint.empty()) {
    return InvalidOption("checkpoint", "give a checkpoint or the folder of a run");
  }
  if (!c.prompt.empty() && !c.prompt_file.empty()) {
    return InvalidOption("prompt_file", "must be empty with --prompt; got ", c.prompt_file,
                         "; give one of the two");
  }
  return absl::OkStatus();
}

// The device, ranks and precision of the model.
struct Place {
  DeviceType device;
  DType dtype = DType::kFloat32;
  int ranks = 1;
  int threads = 1;         // threads of each rank, on the CPU
  bool processes = false;  // a launcher's processes are the ranks; else threads
};

absl::StatusOr<Place> FindPlace(const GenerateConfig& c, const Launch& launch) {
  Place place;
  BURST_RETURN_IF_ERROR(launch.error);
  BURST_ASSIGN_OR_RETURN(place.device, ResolveDevice(c.train.device, launch.gpus));
  const bool cuda = place.device == DeviceType::kCuda;
  const Precision precision = c.train.precision;
  if (precision == Precision::kFp8) {
    return InvalidOption("precision", "must be auto, fp32, tf32 or bf16; got fp8; give bf16");
  }
  if (!cuda && precision != Precision::kAuto && precision != Precision::kFp32) {
    return InvalidOption("precision", "must be auto or fp32 on the CPU; got ", Name(precision),
                         "; give --device=cuda");
  }
  if (cuda && (precision == Precision::kAuto || precision == Precision::kBf16)) {
    place.dtype = DType::kBFloat16;
  }
  if (precision == Precision::kTf32) cuda::AllowTf32(true);
  place.processes = launch.processes > 1;
  if (place.processes) {
    BURST_RETURN_IF_ERROR(launch.token_error);
    if (c.ranks != -1 && c.ranks != launch.processes) {
      return InvalidOption("ranks", "must be the ", launch.processes, " processes that ",
                           launch.launcher, " started; got ", c.ranks, "; leave it out");
    }
    place.ranks = launch.processes;
    place.threads = launch.cores;
    return place;
  }
  const int most = cuda ? launch.gpus : std::min(kMaxRanks, 64 * launch.cores);
  if (c.ranks > most) {
    return InvalidOption("ranks", "must be at most ", most, cuda ? ", one for each GPU," : "",
                         " here; got ", c.ranks, "; give fewer");
  }
  place.ranks = static_cast<int>(std::max<int64_t>(1, c.ranks));
  place.threads = std::max(1, launch.cores / place.ranks);
  return place;
}

// The source of a model with weights: a checkpoint, or a Hugging Face directory.
struct Source {
  std::string path;
  Pretrained pretrained;
  ModelConfig model;
  int64_t context = 0, window = 0;
  std::string identity;  // identity of the weights

  absl::Status Load(ParameterList* parameters) const {
    return LoadPretrained(pretrained, parameters);
  }
  // Completes an error of reading the source. For a run's checkpoint it adds which other checkpoint
  // is good.
  absl::Status Unusable(const absl::Status& status) const {
    return WithAnotherCheckpoint(
        absl::Status(status.code(), absl::StrCat("--checkpoint: ", status.message())), path,
        "$NAME next to it, of step $STEP, is good");
  }
};

// Tells a Hugging Face directory from a run's folder, which has checkpoints and another kind of
// config.json.
bool IsHuggingFaceDirectory(const std::filesystem::path& path) {
  std::error_code error;  // opening reports a path that cannot be followed
  return std::filesystem::is_directory(path, error) && !HoldsCheckpoints(path.string()) &&
         (std::filesystem::exists(path / "model.safetensors", error) ||
          std::filesystem::exists(path / "model.safetensors.index.json", error) ||
          std::filesystem::exists(path / "pytorch_model.bin", error));
}

absl::StatusOr<Source> FindSource(const GenerateConfig& c) {
  Source source;
  source.path = ResolvePath(c.checkpoint);
  if (IsHuggingFaceDirectory(source.path)) {
    absl::StatusOr<Pretrained> found = FindPretrained(source.path, IgnoredFields(c.train));
    if (!found.ok()) return source.Unusable(found.status());
    source.model = found->model;
    source.context = found->model.context;
    source.window = found->window;
    absl::StatusOr<std::string> identity = FingerprintOf(*found);
    if (!identity.ok()) return source.Unusable(identity.status());
    source.identity = *std::move(identity);
    source.pretrained = *std::move(found);
    return source;
  }
  if (!c.train.ignore_fields.empty()) {
    return InvalidOption("ignore_fields", "must be empty for a checkpoint; got ",
                         c.train.ignore_fields, "; leave it out");
  }
  std::error_code error;
  if (std::filesystem::is_directory(source.path, error)) source.path = CheckpointPath(source.path);
  const absl::StatusOr<CheckpointInfo> info = ReadCheckpointInfo(source.path);
  if (!info.ok()) return source.Unusable(info.status());
  source.pretrained = {Pretrained::Kind::kCheckpoint, source.path, info->model, info->window};
  source.model = info->model;
  source.context = info->seqlen;
  source.window = info->window;
  source.identity = source.pretrained.identity = info->identity;
  return source;
}

// Returns the model's own tokenizer, or the given one.
absl::StatusOr<Tokenizer> FindTokenizer(const GenerateConfig& c, const Source& source) {
  if (c.tokenizer.empty()) {
    absl::StatusOr<Tokenizer> own = TokenizerOf(source.pretrained);
    if (own.ok()) return own;
    return absl::Status(own.status().code(), absl::StrCat("--checkpoint: ", own.status().message(),
                                                          "; to write text, give --tokenizer"));
  }
  absl::StatusOr<Tokenizer> given = Tokenizer::Load(ResolvePath(c.tokenizer));
  if (!given.ok()) return InvalidOption("tokenizer", given.status().message());
  return given;
}

absl::StatusOr<PromptRules> FindRules(const GenerateConfig& c, const Source& source,
                                      const Tokenizer& tokenizer) {
  const bool as_usual = c.bos == Bos::kAuto;
  absl::StatusOr<PromptRules> rules = source.pretrained.kind == Pretrained::Kind::kHuggingFace
                                          ? ReadPromptRules(source.path, tokenizer, as_usual)
                                          : RulesOfCheckpoint(source.path, tokenizer, as_usual);
  if (!rules.ok()) {
    return absl::Status(rules.status().code(),
                        absl::StrCat("--checkpoint: ", rules.status().message()));
  }
  if (c.bos != Bos::kYes) return rules;
  absl::StatusOr<std::vector<int32_t>> begin = tokenizer.Beginning();
  if (!begin.ok()) return InvalidOption("bos", begin.status().message());
  if (begin->empty()) return InvalidOption("bos", "the tokenizer puts nothing before a text");
  rules->begin = *std::move(begin);
  return rules;
}

// Returns the prompt of --prompt or --prompt_file.
absl::StatusOr<std::string> ReadPrompt(const GenerateConfig& c, bool one_process) {
  if (c.prompt_file.empty()) return c.prompt;
  if (c.prompt_file != "-") {
    absl::StatusOr<std::string> text = ReadFile(ResolvePath(c.prompt_file));
    if (!text.ok()) return InvalidOption("prompt_file", text.status().message());
    return text;
  }
  if (!one_process) {
    return InvalidOption("prompt_file", "- is read by one process; give a file that all ranks see");
  }
  std::string text, block(1 << 16, '\0');
  while (const size_t bytes = std::fread(block.data(), 1, block.size(), stdin)) {
    text.append(block, 0, bytes);
  }
  if (std::ferror(stdin) != 0) return InvalidOption("prompt_file", "cannot read standard input");
  return text;
}

// Returns the prompt's tokens. The model must have all of them.
absl::StatusOr<std::vector<int32_t>> TokensOfPrompt(const std::string& prompt, const Source& source,
                                                    const Tokenizer& tokenizer,
                                                    const PromptRules& rules) {
  const absl::StatusOr<std::vector<int32_t>> tokens = EncodePrompt(tokenizer, prompt, rules);
  if (!tokens.ok()) return InvalidOption("prompt", tokens.status().message());
  for (const int32_t token : *tokens) {
    if (token < source.model.vocab) continue;
    return InvalidOption("prompt", "must be tokens of the model, which has ", source.model.vocab,
                         "; got the token ", token, " ('",
                         absl::Utf8SafeCEscape(tokenizer.Decode({token})), "') of the ",
                         tokenizer.vocab(),
                         " of the tokenizer; give the model's own tokenizer (--tokenizer), or "
                         "another prompt");
  }
  return tokens;
}

// Prints warnings before the text.
void Warn(const Source& source, const Tokenizer& tokenizer, int64_t prompt_tokens) {
  const int64_t read = ReadTokens(prompt_tokens, source.context);
  if (read < prompt_tokens) {
    absl::FPrintF(stderr,
                  "warning: the prompt has %s tokens and the model's context %s: the last %s of "
                  "them are read\n",
                  Thousands(prompt_tokens), Thousands(source.context), Thousands(read));
  }
  const std::string unread = UnreadWeights(source.pretrained);
  if (!unread.empty()) absl::FPrintF(stderr, "warning: --checkpoint: %s\n", unread);
  if (tokenizer.vocab() > source.model.vocab) {
    absl::FPrintF(stderr,
                  "warning: the tokenizer has %s tokens and the model %s: the others are never "
                  "generated\n",
                  Thousands(tokenizer.vocab()), Thousands(source.model.vocab));
  }
}

// Generates. `processes` is this process's communicator if the ranks are processes, else null.
absl::Status Run(const GenerateConfig& c, const Place& place, Communicator* processes) {
  BURST_ASSIGN_OR_RETURN(const Source source, FindSource(c));
  BURST_ASSIGN_OR_RETURN(const Tokenizer tokenizer, FindTokenizer(c, source));
  BURST_ASSIGN_OR_RETURN(const PromptRules rules, FindRules(c, source, tokenizer));
  BURST_ASSIGN_OR_RETURN(const std::string prompt, ReadPrompt(c, processes == nullptr));
  BURST_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens,
                         TokensOfPrompt(prompt, source, tokenizer, rules));
  if (processes != nullptr) {
    BURST_RETURN_IF_ERROR(
        CheckAgreement(processes, {{"--checkpoint, its model", ModelConfigToJson(source.model)},
                                   {"--checkpoint, its weights", source.identity},
                                   {"--checkpoint, its context", absl::StrCat(source.context)},
                                   {"--checkpoint, its window", absl::StrCat(source.window)},
                                   {"--tokenizer", tokenizer.ToJson()},
                                   {"--prompt, its tokens", absl::StrJoin(tokens, " ")}}));
  }
  if (processes == nullptr || processes->rank() == 0) {
    Warn(source, tokenizer, static_cast<int64_t>(tokens.size()));
  }
  GenerationOptions options;
  options.sampling = {c.temperature, c.top_k, static_cast<uint64_t>(c.seed),
                      c.top_p,       c.min_p, c.repetition_penalty};
  options.tokens = c.tokens;
  options.ends = rules.ends;
  options.context = source.context;
  options.window = source.window;
  const auto print = [](absl::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;
  };
  const auto generate = [&](Communicator* comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(
        const std::unique_ptr<Transformer> model,
        Transformer::Create(source.model, place.dtype, /*seed=*/std::nullopt, place.device,
                            /*parallel=*/{}, StateSharding::ValuesAlone()));
    const absl::Status loaded = source.Load(&model->parameters());
    if (!loaded.ok()) return source.Unusable(loaded);
    // Chunks keep the memory of a long prompt from growing with its tokens times ffn.
    ExecutionPlan execution;
    execution.ffn_chunk = kFfnChunk;
    model->SetExecution(execution);
    if (comm == nullptr || comm->rank() == 0) print(prompt);
    if (comm == nullptr) return Generate(*model, tokenizer, tokens, options, print);
    BurstAttentionOptions attention_options;
    attention_options.layout = c.train.layout;
    attention_options.scores.softcap = source.model.attention_softcap;
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(attention_options, comm));
    return Generate(*model, tokenizer, tokens, options, print,
                    GenerationRanks{comm, attention.get(), Mask::SlidingWindow(source.window)});
  };
  const auto with_pool = [&](Communicator& comm) {
    const ScopedThreadPool pool(place.threads);
    return generate(&comm);
  };
  if (processes != nullptr) {
    BURST_RETURN_IF_ERROR(with_pool(*processes));
  } else if (place.ranks == 1) {
    const ScopedThreadPool pool(place.threads);
    BURST_RETURN_IF_ERROR(generate(nullptr));
  } else {
    BURST_RETURN_IF_ERROR(place.device == DeviceType::kCuda ? RunCudaRanks(place.ranks, with_pool)
                                                            : RunRanks(place.ranks, with_pool));
  }
  if (processes == nullptr || processes->rank() == 0) print("\n");
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  GenerateConfig config;
  OptionTable options = Options(&config);
  const std::string help = options.Help(
      "Generates text from a checkpoint of //train or a Hugging Face directory.\n\n"
      "  bazel run //train:generate -- --checkpoint=runs/NAME --prompt='And'\n");
  if (PrintHelpOrVersion(argc, argv, help)) return 0;
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok()) usage = Check(config);
  absl::StatusOr<Place> place;
  if (usage.ok()) {
    place = FindPlace(config, DetectLaunch());
    usage = place.status();
  }
  if (usage.ok() && place->ranks == 1 && options.Given("layout")) {
    usage = InvalidOption("layout", Name(config.train.layout), " has no effect with --ranks=1");
  }
  if (!usage.ok()) return RefuseUsage(usage, ProcessRank());
  const auto processes = LaunchedRanks::Connect(place->device);
  if (!processes.ok()) return ExitCode(processes.status(), kExitFailure);
  Communicator* const comm = *processes == nullptr ? nullptr : &(*processes)->comm();
  absl::Status status;
  if (comm != nullptr) {
    status = CheckAgreement(comm, AgreedOptions(options, LaunchIsOnOneHost()));
  }
  if (status.ok()) status = Run(config, *place, comm);
  if (status.ok()) return 0;
  if (comm == nullptr) return ExitCode(status, kExitFailure);
  if (comm->rank() > 0) LetOthersReport();  // most errors occur in all processes
  comm->Abort(status);                      // does not return
  return kExitFailure;
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
