#include "train/run/setup.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/data/batch.h"
#include "train/data/sources.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

constexpr char kOfAllData[] = "xxh3:";  // prefix of a fingerprint

// Returns the fingerprint of all data. Other tokens, another tokenizer or another split give
// another fingerprint.
std::string FingerprintOf(const TrainingData& data) {
  std::vector<uint64_t> parts;
  for (const TokenSpan* span : {&data.train, &data.validation}) {
    parts.insert(parts.end(), {span->corpus->digest(), static_cast<uint64_t>(span->begin),
                               static_cast<uint64_t>(span->end)});
  }
  return absl::StrFormat("%s%016x", kOfAllData,
                         XXH3_64bits(parts.data(), parts.size() * sizeof(parts[0])));
}

// Returns the fingerprint of earlier versions: FNV-1a over a sample of tokens of both parts.
absl::StatusOr<std::string> SampledFingerprintOf(const TrainingData& data) {
  constexpr int64_t kProbes = 256, kTokens = 256;
  uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  std::vector<int32_t> tokens(kTokens);
  for (const TokenSpan* span : {&data.train, &data.validation}) {
    mix(static_cast<uint64_t>(span->size()));
    const int64_t n = std::min(kTokens, span->size());
    for (int64_t probe = 0; probe < kProbes; ++probe) {
      const int64_t at = span->begin + (span->size() - n) * probe / kProbes;
      BURST_RETURN_IF_ERROR(span->corpus->Read(at, n, tokens.data()));
      for (int64_t i = 0; i < n; ++i) mix(static_cast<uint64_t>(tokens[i]));
    }
  }
  return absl::StrFormat("%016x", hash);
}

absl::Status CheckTokens(const TrainingData& data, int64_t vocab) {
  BURST_RETURN_IF_ERROR(data.train.corpus->CheckVocab(vocab));
  return data.validation.corpus->CheckVocab(vocab);
}

// Checks the vocabulary size that shards without a tokenizer give. The model becomes as large, so a
// wrong header would ask for any amount of memory.
absl::Status CheckShardVocabulary(const TrainingData& data) {
  constexpr int64_t kOrdinary = 1 << 20;  // more tokens than tokenizers have
  constexpr int64_t kFar = 16;
  if (data.tokenizer.has_value() || data.vocab <= kOrdinary) return absl::OkStatus();
  if (!data.train.corpus->CheckVocab(data.vocab / kFar).ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--data: its header says that the vocabulary has ", data.vocab, " tokens, but none is above ",
      data.vocab / kFar, "; if that is so, give --tokenizer, or a --model with this vocabulary"));
}

absl::Status FitVocabulary(const TrainingData& data, ModelConfig* model) {
  if (model->vocab == 0) {
    BURST_RETURN_IF_ERROR(CheckShardVocabulary(data));
    model->vocab = data.vocab;
  }
  if (data.tokenizer.has_value()) {
    if (model->vocab >= data.vocab) return CheckTokens(data, model->vocab);
    return absl::InvalidArgumentError(
        absl::StrCat("--model: its vocabulary of ", model->vocab, " is smaller than the ",
                     data.vocab, " tokens of the ", data.tokenizer->name(),
                     " tokenizer; give --model.vocab=", data.vocab, " to add rows"));
  }
  return CheckTokens(data, model->vocab);
}

absl::Status CheckWindow(const char* option, const char* part, const TokenSpan& span,
                         int64_t seqlen, const char* advice) {
  if (span.size() > seqlen) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", option, ": the ", part, " part holds ",
                                                 span.size(),
                                                 " tokens, too few for --seqlen=", seqlen, advice));
}

// Finds contradictions that only the data shows.
absl::Status CheckAgainstData(const ResolvedConfig& options, const TrainingData& data) {
  BURST_RETURN_IF_ERROR(
      CheckWindow("data", "training", data.train, options.seqlen, "; give a shorter one"));
  if (options.eval_every > 0) {
    BURST_RETURN_IF_ERROR(CheckWindow(options.val_data.empty() ? "data" : "val_data", "validation",
                                      data.validation, options.seqlen,
                                      "; give a shorter one, --val_data or --eval_every=0"));
  }
  BURST_RETURN_IF_ERROR(CheckTeaches("data", data.train, data.end_of_text));
  if (options.eval_every > 0) {
    BURST_RETURN_IF_ERROR(CheckTeaches(options.val_data.empty() ? "data" : "val_data",
                                       data.validation, data.end_of_text));
  }
  if (options.packed && !data.has_documents) {
    return absl::InvalidArgumentError(
        "--packed: the training data is a single document; there is nothing to pack");
  }
  if (options.sample.value_or(0) > 0 && !data.tokenizer.has_value()) {
    return absl::InvalidArgumentError(
        "--sample: .bin shards come without a tokenizer to write text with; give --tokenizer, or "
        "leave it out");
  }
  return absl::OkStatus();
}

// Returns the tokenizer of a file, or the model's own if the option is auto. Returns nullopt for
// the kind in `config.tokenizer`, or for characters.
absl::StatusOr<std::optional<Tokenizer>> FindTokenizer(const ResolvedConfig& config,
                                                       const std::string& data) {
  const auto named = [](const absl::Status& status, absl::string_view advice) {
    return absl::Status(status.code(), absl::StrCat("--tokenizer: ", status.message(), advice));
  };
  if (!config.tokenizer_path.empty()) {
    absl::StatusOr<Tokenizer> found = Tokenizer::Load(config.tokenizer_path);
    if (!found.ok()) return named(found.status(), "");
    return *std::move(found);
  }
  const bool has_weights = config.pretrained.has_value() || !config.lost_folder.empty();
  if (config.tokenizer.has_value() || !has_weights) return std::nullopt;
  BURST_ASSIGN_OR_RETURN(const Sources sources, FindSources("data", data));
  if (sources.shards) return std::nullopt;
  // The tokenizer that the run began with, even if the model's folder has changed.
  if (config.resume) {
    const Pretrained run = {Pretrained::Kind::kCheckpoint, CheckpointPath(config.out), {}, 0};
    absl::StatusOr<Tokenizer> found = TokenizerOf(run);
    // Finding the run reports a damaged checkpoint.
    if (found.ok() || !config.pretrained.has_value()) {
      return found.ok() ? std::make_optional(*std::move(found)) : std::nullopt;
    }
  }
  absl::StatusOr<Tokenizer> found = TokenizerOf(*config.pretrained);
  if (found.ok()) return *std::move(found);
  return named(found.status(),
               "; a model with weights is trained on its own tokens: give its tokenizer.model, "
               "tokenizer.json or their folder, or char or byte to train it on other tokens");
}

// Adds to a data cache's error why the cache is in its folder, if no option named the folder.
absl::Status WhereTheCacheIs(const ResolvedConfig& config, const absl::Status& status) {
  const bool of_cache = absl::StartsWith(status.message(), "--data_cache: ");
  if (!of_cache || !config.data_cache.empty()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), "; without the option it is next to --out=",
                                   config.out.empty() ? "runs/NAME" : config.out));
}

}  // namespace

absl::Status AgreeOn(const absl::Status& status, Communicator* comm) {
  BURST_ASSIGN_OR_RETURN(const std::vector<double> failed, comm->AllGather(status.ok() ? 0 : 1));
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (first == failed.end()) return absl::OkStatus();
  if (first - failed.begin() == comm->rank()) return status;
  return absl::CancelledError(absl::StrCat("rank ", first - failed.begin(), " failed"));
}

absl::Status AgreeOrWait(const absl::Status& status, Communicator* comm) {
  const absl::Status agreed = AgreeOn(status, comm);
  if (absl::IsCancelled(agreed)) BURST_RETURN_IF_ERROR(comm->Barrier());
  return agreed;
}

absl::Status CannotResume(const absl::Status& error, const std::string& path) {
  return WithAnotherCheckpoint(
      absl::Status(error.code(), absl::StrCat("--resume: ", error.message())), path,
      "to continue after step $STEP, rename $NAME, which is good, to checkpoint.safetensors");
}

absl::StatusOr<TrainingSetup> PrepareTraining(const ResolvedConfig& config) {
  TrainingSetup setup;
  setup.config = config;
  BURST_ASSIGN_OR_RETURN(std::vector<MixturePart> parts, ParseMixture(config.data));
  for (MixturePart& part : parts) {
    if (part.path != "kjv") continue;
    BURST_ASSIGN_OR_RETURN(part.path, FindRunfile("kjv/kjv.txt"));
  }
  const std::string data = MixtureText(parts);
  BURST_ASSIGN_OR_RETURN(const std::optional<Tokenizer> tokenizer,
                         FindTokenizer(config, parts[0].path));
  absl::StatusOr<TrainingData> loaded =
      LoadTrainingData(data, config.val_data, config.tokenizer, DataCacheFolder(config),
                       tokenizer.has_value() ? &*tokenizer : nullptr, config.lines);
  if (!loaded.ok()) return WhereTheCacheIs(config, loaded.status());
  setup.data = *std::move(loaded);
  BURST_RETURN_IF_ERROR(CheckAgainstData(config, setup.data));
  const absl::StatusOr<SequenceSampler> sampler =
      SequenceSampler::Create(setup.data.train, {config.seqlen, 0, config.packed});
  if (!sampler.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--data: ", sampler.status().message()));
  }
  BURST_RETURN_IF_ERROR(setup.config.SetEpochs(sampler->per_epoch()));
  BURST_RETURN_IF_ERROR(FitVocabulary(setup.data, &setup.config.model));
  setup.config.model = setup.config.model.WithDefaults();
  setup.data_fingerprint = FingerprintOf(setup.data);
  const bool none = config.zero == 3 || config.checkpoint_files == CheckpointFiles::kNone;
  setup.sample = setup.data.tokenizer.has_value() ? config.sample.value_or(none ? 0 : 256) : 0;
  return setup;
}

absl::Status FindResumed(TrainingSetup* setup) {
  const ResolvedConfig& config = setup->config;
  if (!config.resume) return absl::OkStatus();
  const std::string path = CheckpointPath(config.out);
  absl::StatusOr<CheckpointInfo> found = ReadCheckpointInfo(path);
  if (!found.ok()) return CannotResume(found.status(), path);
  BURST_RETURN_IF_ERROR(config.CheckResume(found->config));
  std::string data_fingerprint = setup->data_fingerprint;
  if (!absl::StartsWith(found->data_fingerprint, kOfAllData)) {
    BURST_ASSIGN_OR_RETURN(data_fingerprint, SampledFingerprintOf(setup->data));
  }
  if (found->data_fingerprint != data_fingerprint) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--data: must give the tokens that the run in ", config.out, " was trained on; got others ",
        "from ", config.data, "; give the run's own data and tokenizer, or begin another run"));
  }
  const std::string difference = ModelDifference(config.model, found->model);
  if (!difference.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("--model: not the run's model: ", difference));
  }
  if (found->step > config.steps) {
    return absl::FailedPreconditionError(absl::StrCat("--steps: the run has made ", found->step,
                                                      " steps already; give more than that"));
  }
  // A run whose last evaluation was interrupted continues with that evaluation.
  setup->finished =
      found->step == config.steps && (config.eval_every == 0 || found->val_loss.has_value());
  if (!setup->finished && config.profile_first > 0 && config.profile_first <= found->step) {
    return absl::FailedPreconditionError(absl::StrCat("--profile_steps: it begins with step ",
                                                      config.profile_first, "; the run has made ",
                                                      found->step, " steps already"));
  }
  setup->resumed = *std::move(found);
  return absl::OkStatus();
}

}  // namespace burst
