#include "train/generate/loaded_model.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/attention/burst_attention.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/process.h"
#include "burst/comm/agreement.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launched_ranks.h"
#include "burst/comm/thread/thread_communicator.h"
#include "model/ops/cuda/matmul.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/kept_checkpoints.h"

namespace burst {
namespace {

constexpr int64_t kFfnChunk = 8192;  // tokens

absl::StatusOr<Place> FindPlace(const ModelOptions& c, const Launch& launch) {
  Place place;
  BURST_RETURN_IF_ERROR(launch.error);
  BURST_ASSIGN_OR_RETURN(place.device, ResolveDevice(c.train.device, launch.gpus));
  const bool cuda = place.device == DeviceType::kCuda;
  const Precision precision = c.train.precision;
  if (precision == Precision::kFp8) {
    return InvalidOption("precision", "must be auto, fp32, tf32 or bf16; got fp8; give bf16");
  }
  if (!cuda && precision == Precision::kTf32) {
    return InvalidOption("precision", "must be auto, fp32 or bf16 on the CPU; got tf32; ",
                         "give --device=cuda");
  }
  if (precision == Precision::kBf16 || (cuda && precision == Precision::kAuto)) {
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

// Tells a Hugging Face directory from a run's folder, which has checkpoints and another kind of
// config.json.
bool IsHuggingFaceDirectory(const std::filesystem::path& path) {
  std::error_code error;  // opening reports a path that cannot be followed
  return std::filesystem::is_directory(path, error) && !HoldsCheckpoints(path.string()) &&
         (std::filesystem::exists(path / "model.safetensors", error) ||
          std::filesystem::exists(path / "model.safetensors.index.json", error) ||
          std::filesystem::exists(path / "pytorch_model.bin", error) ||
          // Then the weights are missing, which the reader says. Runs keep this file elsewhere.
          std::filesystem::exists(path / "tokenizer_config.json", error));
}

}  // namespace

void AddSourceOptions(ModelOptions* options, OptionTable* table) {
  table->Add("checkpoint", &options->checkpoint)
      .Help(
          "Load a checkpoint, the newest one of the folder of a run, or a Hugging Face directory.");
  table->Add("tokenizer", &options->tokenizer)
      .Help(
          "Read tokenizer.model, tokenizer.json, or their folder (or GPT-2's encoder.json and "
          "vocab.bpe), for a checkpoint without one.");
}

void AddRankOptions(ModelOptions* options, OptionTable* table) {
  table->Add("ranks", &options->ranks)
      .Min(1)
      .Or(-1)
      .Help(
          "Spread tokens, keys and values over N threads or GPUs, each with the whole model. -1: "
          "the processes of a launcher, else 1.");
  // Their rows in //train's table have the fields and the rules, but speak of training.
  const OptionTable train = TrainOptions(&options->train);
  table->AddShared(train, "ignore_fields")
      .Help("Read config.json of a directory without these fields, separated by commas.");
  table->AddShared(train, "layout").Help("Spread a sequence as contiguous, zigzag or striped.");
  table->AddShared(train, "device").Help("Run on cpu or cuda. auto: cuda where a GPU is found.");
  table->AddShared(train, "precision")
      .Help("Compute in fp32, tf32 or bf16. auto: bf16 on GPUs, fp32 on CPUs.");
}

absl::StatusOr<ModelSource> ModelSource::Find(const ModelOptions& options) {
  ModelSource source;
  source.path = ResolvePath(options.checkpoint);
  if (IsHuggingFaceDirectory(source.path)) {
    absl::StatusOr<Pretrained> found = FindPretrained(source.path, IgnoredFields(options.train));
    if (!found.ok()) return source.Unusable(found.status());
    source.model = found->model;
    source.seqlen = source.context = found->model.context;
    source.window = found->window;
    absl::StatusOr<std::string> identity = FingerprintOf(*found);
    if (!identity.ok()) return source.Unusable(identity.status());
    source.identity = *std::move(identity);
    source.pretrained = *std::move(found);
    return source;
  }
  if (!options.train.ignore_fields.empty()) {
    return InvalidOption("ignore_fields", "must be empty for a checkpoint; got ",
                         options.train.ignore_fields, "; leave it out");
  }
  std::error_code error;
  if (std::filesystem::is_directory(source.path, error)) source.path = CheckpointPath(source.path);
  const absl::StatusOr<CheckpointInfo> info = ReadCheckpointInfo(source.path);
  if (!info.ok()) return source.Unusable(info.status());
  source.pretrained = {Pretrained::Kind::kCheckpoint, source.path, info->model, info->window};
  source.model = info->model;
  source.seqlen = info->seqlen;
  source.context = ContextOf(source.path, *info);
  source.window = info->window;
  source.identity = source.pretrained.identity = info->identity;
  return source;
}

absl::Status ModelSource::Unusable(const absl::Status& status) const {
  return WithAnotherCheckpoint(
      absl::Status(status.code(), absl::StrCat("--checkpoint: ", status.message())), path,
      "$NAME next to it, of step $STEP, is good");
}

absl::StatusOr<std::unique_ptr<Transformer>> ModelSource::Load(const Place& place) const {
  BURST_ASSIGN_OR_RETURN(
      std::unique_ptr<Transformer> loaded,
      Transformer::Create(model, place.dtype, /*seed=*/std::nullopt, place.device,
                          /*parallel=*/{}, StateSharding::ValuesAlone()));
  const absl::Status status = LoadPretrained(pretrained, &loaded->parameters());
  if (!status.ok()) return Unusable(status);
  // Chunks keep the memory of a long sequence from growing with its tokens times ffn.
  ExecutionPlan execution;
  execution.ffn_chunk = kFfnChunk;
  loaded->SetExecution(execution);
  return loaded;
}

absl::StatusOr<Tokenizer> ModelSource::FindTokenizer(const ModelOptions& options) const {
  if (options.tokenizer.empty()) {
    absl::StatusOr<Tokenizer> own = TokenizerOf(pretrained);
    if (own.ok()) return own;
    return absl::Status(own.status().code(), absl::StrCat("--checkpoint: ", own.status().message(),
                                                          "; to write text, give --tokenizer"));
  }
  absl::StatusOr<Tokenizer> given = Tokenizer::Load(ResolvePath(options.tokenizer));
  if (!given.ok()) return InvalidOption("tokenizer", given.status().message());
  return given;
}

absl::StatusOr<PromptRules> ModelSource::FindRules(const Tokenizer& own, bool with_begin) const {
  absl::StatusOr<PromptRules> rules = pretrained.kind == Pretrained::Kind::kHuggingFace
                                          ? ReadPromptRules(path, own, with_begin)
                                          : RulesOfCheckpoint(path, own, with_begin);
  if (rules.ok()) return rules;
  return absl::Status(rules.status().code(),
                      absl::StrCat("--checkpoint: ", rules.status().message()));
}

absl::Status ModelSource::CheckAgreement(Communicator* processes) const {
  return burst::CheckAgreement(processes, {{"--checkpoint, its model", ModelConfigToJson(model)},
                                           {"--checkpoint, its weights", identity},
                                           {"--checkpoint, its context", absl::StrCat(context)},
                                           {"--checkpoint, its window", absl::StrCat(window)}});
}

absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> AttentionOver(
    const ModelOptions& options, const ModelSource& source, Communicator* comm) {
  BurstAttentionOptions attention;
  attention.layout = options.train.layout;
  attention.scores.softcap = source.model.attention_softcap;
  return BurstAttention::Create(attention, comm);
}

absl::Status OnRanks(const Place& place, Communicator* processes,
                     const std::function<absl::Status(Communicator&)>& work) {
  const auto with_pool = [&](Communicator& comm) {
    const ScopedThreadPool pool(place.threads);
    return work(comm);
  };
  if (processes != nullptr) return with_pool(*processes);
  return place.device == DeviceType::kCuda ? RunCudaRanks(place.ranks, with_pool)
                                           : RunRanks(place.ranks, with_pool);
}

int RunOnPlace(const ModelOptions& options, const OptionTable& table, absl::Status usage,
               const std::function<absl::Status(const Place&, Communicator*)>& work) {
  absl::StatusOr<Place> place;
  if (usage.ok() && options.checkpoint.empty()) {
    usage = InvalidOption("checkpoint", "give a checkpoint or the folder of a run");
  }
  if (usage.ok()) {
    place = FindPlace(options, DetectLaunch());
    usage = place.status();
  }
  if (usage.ok() && place->ranks == 1 && table.Given("layout")) {
    usage = InvalidOption("layout", Name(options.train.layout), " has no effect with --ranks=1");
  }
  if (usage.ok() && options.train.layout == Layout::kBalanced) {
    usage = InvalidOption("layout",
                          "must be contiguous, zigzag or striped; got balanced, which "
                          "divides packed documents; give zigzag");
  }
  if (!usage.ok()) return RefuseUsage(usage, ProcessRank());
  const auto processes = LaunchedRanks::Connect(place->device);
  if (!processes.ok()) return ExitCode(processes.status(), kExitFailure);
  Communicator* const comm = *processes == nullptr ? nullptr : &(*processes)->comm();
  absl::Status status;
  if (comm != nullptr) status = CheckAgreement(comm, AgreedOptions(table, LaunchIsOnOneHost()));
  if (status.ok()) status = work(*place, comm);
  if (status.ok()) return 0;
  if (comm == nullptr) return ExitCode(status, kExitFailure);
  if (comm->rank() > 0) LetOthersReport();  // most errors occur in all processes
  comm->Abort(status);                      // does not return
  return kExitFailure;
}

}  // namespace burst
