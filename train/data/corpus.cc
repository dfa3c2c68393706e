#include "train/data/corpus.h"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "burst/cli/text.h"
#include "train/data/data_cache.h"
#include "train/data/mixture.h"
#include "train/data/shard_corpus.h"
#include "train/data/shards.h"
#include "train/data/sources.h"
#include "train/data/text_corpus.h"

namespace burst {
namespace {

std::string Describe(const std::vector<Sources>& sources, size_t parts, const TrainingData& data) {
  size_t files = 0;
  for (size_t i = 0; i < parts; ++i) files += sources[i].files.size();
  const std::string size = Thousands(data.train.corpus->size());
  const std::string what = files == 1
                               ? std::filesystem::path(sources[0].files[0].path).filename().string()
                               : absl::StrCat(files, " files");
  if (sources[0].shards) return absl::StrCat(size, " tokens of ", what);
  const Tokenizer::Kind kind = data.tokenizer->kind();
  return absl::StrFormat("%s %s of %s, %s tokens in the vocabulary", size,
                         kind == Tokenizer::Kind::kByte   ? "bytes"
                         : kind == Tokenizer::Kind::kChar ? "characters"
                                                          : "tokens",
                         what, Thousands(data.vocab));
}

// Returns the tokens that surround the documents of shards.
absl::StatusOr<Tokenizer::Marks> MarksOf(const ShardData& shards, const Tokenizer& tokenizer) {
  constexpr int64_t kLookedAt = 1 << 16;
  Tokenizer::Marks marks;
  if (shards.end_of_text != tokenizer.end_of_text()) marks.separator = shards.end_of_text;
  const absl::StatusOr<std::vector<int32_t>> beginning = tokenizer.Beginning();
  if (!beginning.ok() || beginning->empty()) return marks;  // a template that //train does not need
  std::vector<int32_t> tokens(std::min(kLookedAt, shards.corpus->size()));
  BURST_RETURN_IF_ERROR(shards.corpus->Read(0, static_cast<int64_t>(tokens.size()), tokens.data()));
  marks.begins = std::find(tokens.begin(), tokens.end(), (*beginning)[0]) != tokens.end();
  return marks;
}

absl::Status CheckTokenizer(const ShardData& shards, const Sources& sources,
                            const Tokenizer* tokenizer) {
  if (tokenizer == nullptr || tokenizer->vocab() == shards.vocab) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--tokenizer: it has ", tokenizer->vocab(),
                                                 " tokens, but ", sources.files[0].path,
                                                 " was made with a vocabulary of ", shards.vocab));
}

// Checks that sources are of the same kind as the first ones of --data.
absl::Status CheckKind(const char* option, const std::string& path, const Sources& sources,
                       const Sources& first) {
  if (sources.shards == first.shards && sources.json_lines == first.json_lines) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("--", option, ": ", path,
                                                 " must be of the same kind as --data (",
                                                 first.shards       ? ".bin shards"
                                                 : first.json_lines ? ".jsonl"
                                                                    : "text",
                                                 ")"));
}

// Opens shards, all of one vocabulary.
absl::Status OpenAllShards(const std::vector<Sources>& all, const DataCache& cache,
                           const Tokenizer* vocabulary,
                           std::vector<std::shared_ptr<const Corpus>>* corpora,
                           TrainingData* data) {
  for (const Sources& sources : all) {
    BURST_ASSIGN_OR_RETURN(const ShardData shards, OpenShards(sources, cache));
    if (corpora->empty()) {
      BURST_RETURN_IF_ERROR(CheckTokenizer(shards, sources, vocabulary));
      data->vocab = shards.vocab;
      data->end_of_text = shards.end_of_text;
      if (vocabulary != nullptr) {
        data->tokenizer = *vocabulary;
        BURST_ASSIGN_OR_RETURN(const Tokenizer::Marks marks, MarksOf(shards, *vocabulary));
        data->tokenizer->set_marks(marks);
      }
    } else if (shards.vocab != data->vocab || shards.end_of_text != data->end_of_text) {
      return sources.Error(absl::InvalidArgumentError(
          absl::StrCat(sources.files[0].path, " is of another vocabulary than --data")));
    }
    corpora->push_back(shards.corpus);
  }
  return absl::OkStatus();
}

// Returns one span of all spans. `parts` has the weights of a mixture, or is empty.
TokenSpan Joined(const std::vector<TokenSpan>& spans, const std::vector<MixturePart>& parts) {
  if (spans.size() == 1) return spans[0];
  TokenSpan joined;
  std::vector<double> weights;
  for (size_t i = 0; i < spans.size(); ++i) {
    const int64_t begin = joined.end;
    joined.end += spans[i].size();
    if (parts.empty()) continue;
    joined.mixture.push_back({begin, joined.end, parts[i].weight});
    weights.push_back(parts[i].weight);
  }
  joined.corpus =
      JoinCorpora(spans, XXH3_64bits(weights.data(), weights.size() * sizeof(weights[0])));
  return joined;
}

}  // namespace

absl::StatusOr<TrainingData> LoadTrainingData(const std::string& data_path,
                                              const std::string& validation_path,
                                              std::optional<Tokenizer::Kind> tokenizer,
                                              const std::string& cache_folder,
                                              const Tokenizer* vocabulary,
                                              const LineFormat& lines) {
  BURST_ASSIGN_OR_RETURN(const std::vector<MixturePart> parts, ParseMixture(data_path));
  std::vector<Sources> all;
  for (const MixturePart& part : parts) {
    BURST_ASSIGN_OR_RETURN(Sources found, FindSources("data", part.path));
    all.push_back(std::move(found));
    BURST_RETURN_IF_ERROR(CheckKind("data", part.path, all.back(), all[0]));
  }
  if (!validation_path.empty()) {
    BURST_ASSIGN_OR_RETURN(Sources found, FindSources("val_data", validation_path));
    all.push_back(std::move(found));
    BURST_RETURN_IF_ERROR(CheckKind("val_data", validation_path, all.back(), all[0]));
  }
  const Sources& train = all[0];
  BURST_RETURN_IF_ERROR(CheckHasLines(lines, train.json_lines));
  if (train.shards && tokenizer.has_value()) {
    return absl::InvalidArgumentError(
        "--tokenizer: .bin shards hold tokens already; give the file they were made with, or none");
  }

  TrainingData data;
  const DataCache cache(cache_folder);
  std::vector<std::shared_ptr<const Corpus>> corpora;  // of `all`
  if (train.shards) {
    BURST_RETURN_IF_ERROR(OpenAllShards(all, cache, vocabulary, &corpora, &data));
  } else {
    std::vector<const Sources*> sources;
    for (const Sources& one : all) sources.push_back(&one);
    BURST_ASSIGN_OR_RETURN(
        TextCorpora texts,
        OpenTexts(sources, tokenizer.value_or(Tokenizer::Kind::kChar), vocabulary, lines, cache));
    data.tokenizer = std::move(texts.tokenizer);
    data.vocab = data.tokenizer->vocab();
    data.end_of_text = data.tokenizer->end_of_text();
    corpora = std::move(texts.corpora);
  }

  std::vector<TokenSpan> training, validation;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t size = corpora[i]->size();
    const int64_t end =
        validation_path.empty() ? static_cast<int64_t>(0.9 * static_cast<double>(size)) : size;
    training.push_back({corpora[i], 0, end});
    validation.push_back({corpora[i], end, size});
  }
  if (!validation_path.empty()) validation = {{corpora.back(), 0, corpora.back()->size()}};
  data.train = Joined(training, parts);
  data.validation = Joined(validation, {});
  data.has_documents = data.train.corpus->second_document() < data.train.end;
  data.summary = Describe(all, parts.size(), data);
  return data;
}

absl::Status CheckTeaches(absl::string_view option, const TokenSpan& span, int32_t end_of_text) {
  if (span.size() == 0) return absl::OkStatus();
  constexpr int64_t kAtOnce = 1 << 16;
  if (span.corpus->has_marks()) {
    std::vector<int64_t> not_counted;
    for (int64_t begin = span.begin; begin < span.end; begin += kAtOnce) {
      const int64_t end = std::min(begin + kAtOnce, span.end);
      not_counted.clear();
      BURST_RETURN_IF_ERROR(span.corpus->NotCounted(begin, end, &not_counted));
      if (static_cast<int64_t>(not_counted.size()) < end - begin) return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("--", option, ": must teach something; got ", Thousands(span.size()),
                     " tokens that do not count in the loss; give documents with counted tokens"));
  }
  if (end_of_text < 0) return absl::OkStatus();
  std::vector<int32_t> tokens;
  for (int64_t begin = span.begin; begin < span.end; begin += kAtOnce) {
    tokens.resize(std::min(kAtOnce, span.end - begin));
    BURST_RETURN_IF_ERROR(
        span.corpus->Read(begin, static_cast<int64_t>(tokens.size()), tokens.data()));
    for (const int32_t token : tokens) {
      if (token != end_of_text) return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--", option, ": must teach something; got ", Thousands(span.size()),
                   " end-of-text tokens (", end_of_text, ") and nothing else; give documents"));
}

}  // namespace burst
