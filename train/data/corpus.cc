#include "train/data/corpus.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "burst/cli/text.h"
#include "train/data/data_cache.h"
#include "train/data/shard_corpus.h"
#include "train/data/shards.h"
#include "train/data/sources.h"
#include "train/data/text_corpus.h"

namespace burst {
namespace {

std::string Describe(const Sources& sources, const TrainingData& data) {
  const std::string size = Thousands(data.train.corpus->size());
  const std::string what = sources.files.size() == 1
                               ? std::filesystem::path(sources.files[0].path).filename().string()
                               : absl::StrCat(sources.files.size(), " files");
  if (sources.shards) return absl::StrCat(size, " tokens of ", what);
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

}  // namespace

absl::StatusOr<TrainingData> LoadTrainingData(const std::string& data_path,
                                              const std::string& validation_path,
                                              std::optional<Tokenizer::Kind> tokenizer,
                                              const std::string& cache_folder,
                                              const Tokenizer* vocabulary,
                                              const LineFormat& lines) {
  BURST_ASSIGN_OR_RETURN(const Sources train, FindSources("data", data_path));
  std::optional<Sources> validation;
  if (!validation_path.empty()) {
    BURST_ASSIGN_OR_RETURN(validation, FindSources("val_data", validation_path));
    if (validation->shards != train.shards || validation->json_lines != train.json_lines) {
      return absl::InvalidArgumentError(absl::StrCat("--val_data: ", validation_path,
                                                     " must be of the same kind as --data (",
                                                     train.shards       ? ".bin shards"
                                                     : train.json_lines ? ".jsonl"
                                                                        : "text",
                                                     ")"));
    }
  }
  if (train.shards && tokenizer.has_value()) {
    return absl::InvalidArgumentError(
        "--tokenizer: .bin shards hold tokens already; give the file they were made with, or none");
  }

  TrainingData data;
  const DataCache cache(cache_folder);
  if (train.shards) {
    BURST_ASSIGN_OR_RETURN(const ShardData shards, OpenShards(train, cache));
    BURST_RETURN_IF_ERROR(CheckTokenizer(shards, train, vocabulary));
    if (vocabulary != nullptr) {
      data.tokenizer = *vocabulary;
      BURST_ASSIGN_OR_RETURN(const Tokenizer::Marks marks, MarksOf(shards, *vocabulary));
      data.tokenizer->set_marks(marks);
    }
    data.vocab = shards.vocab;
    data.end_of_text = shards.end_of_text;
    data.train.corpus = shards.corpus;
    if (validation.has_value()) {
      BURST_ASSIGN_OR_RETURN(const ShardData more, OpenShards(*validation, cache));
      if (more.vocab != shards.vocab || more.end_of_text != shards.end_of_text) {
        return absl::InvalidArgumentError(
            absl::StrCat("--val_data: ", validation_path, " is of another vocabulary than --data"));
      }
      data.validation.corpus = more.corpus;
    }
  } else {
    std::vector<const Sources*> sources = {&train};
    if (validation.has_value()) sources.push_back(&*validation);
    BURST_ASSIGN_OR_RETURN(
        TextCorpora texts,
        OpenTexts(sources, tokenizer.value_or(Tokenizer::Kind::kChar), vocabulary, lines, cache));
    data.tokenizer = std::move(texts.tokenizer);
    data.vocab = data.tokenizer->vocab();
    data.end_of_text = data.tokenizer->end_of_text();
    data.train.corpus = texts.corpora[0];
    if (validation.has_value()) data.validation.corpus = texts.corpora[1];
  }

  data.train.end = data.train.corpus->size();
  if (validation.has_value()) {
    data.validation.end = data.validation.corpus->size();
  } else {
    data.train.end = static_cast<int64_t>(0.9 * static_cast<double>(data.train.end));
    data.validation = {data.train.corpus, data.train.end, data.train.corpus->size()};
  }
  data.has_documents = data.train.corpus->second_document() < data.train.end;
  data.summary = Describe(train, data);
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
