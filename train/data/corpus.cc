#include "train/data/corpus.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/cli/text.h"
#include "train/data/data_cache.h"
#include "train/data/shards.h"
#include "train/data/sources.h"
#include "train/data/text_corpus.h"

namespace burst {
namespace {

// Joins spans into one corpus, in order. `salt` is a part of its digest.
class JoinedCorpus : public Corpus {
 public:
  JoinedCorpus(std::vector<TokenSpan> spans, uint64_t salt) : spans_(std::move(spans)) {
    std::vector<uint64_t> digests = {salt};
    for (const TokenSpan& span : spans_) {
      begins_.push_back(size_);
      size_ += span.size();
      digests.insert(digests.end(), {span.corpus->digest(), static_cast<uint64_t>(span.begin),
                                     static_cast<uint64_t>(span.end)});
    }
    digest_ = XXH3_64bits(digests.data(), digests.size() * sizeof(digests[0]));
  }

  int64_t size() const override { return size_; }
  uint64_t digest() const override { return digest_; }
  int64_t second_document() const override {
    const int64_t second = spans_[0].corpus->second_document() - spans_[0].begin;
    return second > 0 ? std::min(second, spans_[0].size()) : spans_[0].size();
  }
  absl::Status CheckVocab(int64_t vocab) const override {
    for (const TokenSpan& span : spans_) BURST_RETURN_IF_ERROR(span.corpus->CheckVocab(vocab));
    return absl::OkStatus();
  }
  bool has_marks() const override {
    return std::any_of(spans_.begin(), spans_.end(),
                       [](const TokenSpan& span) { return span.corpus->has_marks(); });
  }

  absl::Status Read(int64_t begin, int64_t count, int32_t* out) const override {
    BURST_CHECK(0 <= begin && begin + count <= size_);
    return ForEachPart(begin, begin + count, [&](const TokenSpan& span, int64_t from, int64_t to) {
      const absl::Status status = span.corpus->Read(from, to - from, out);
      out += to - from;
      return status;
    });
  }
  absl::Status DocumentStarts(int64_t begin, int64_t end,
                              std::vector<int64_t>* starts) const override {
    return Places(
        begin, end, starts,
        [](const TokenSpan& span, int64_t from, int64_t to, std::vector<int64_t>* places) {
          // A part begins with a document.
          if (from == span.begin) places->push_back(from);
          return span.corpus->DocumentStarts(std::max(from, span.begin + 1), to, places);
        });
  }
  // The first token of a part ends nothing, because the token before it is of another part.
  bool StartEndsADocument(int64_t start) const override {
    const size_t i = std::upper_bound(begins_.begin(), begins_.end(), start) - begins_.begin() - 1;
    const TokenSpan& span = spans_[i];
    return start > begins_[i] && span.corpus->StartEndsADocument(span.begin + start - begins_[i]);
  }
  absl::Status NotCounted(int64_t begin, int64_t end, std::vector<int64_t>* places) const override {
    return Places(begin, end, places,
                  [](const TokenSpan& span, int64_t from, int64_t to, std::vector<int64_t>* found) {
                    const Corpus& corpus = *span.corpus;
                    if (from == span.begin) found->push_back(from++);
                    if (corpus.has_marks()) return corpus.NotCounted(from, to, found);
                    std::vector<int64_t> starts;
                    const absl::Status status = corpus.DocumentStarts(from, to, &starts);
                    for (const int64_t start : starts) {
                      if (!corpus.StartEndsADocument(start)) found->push_back(start);
                    }
                    return status;
                  });
  }

 private:
  // Calls visit(span, begin, end) for the parts of [begin, end), with places in the part's corpus.
  template <typename Visit>
  absl::Status ForEachPart(int64_t begin, int64_t end, const Visit& visit) const {
    end = std::min(end, size_);
    for (size_t i = 0; i < spans_.size(); ++i) {
      const TokenSpan& span = spans_[i];
      const int64_t from = std::max<int64_t>(0, begin - begins_[i]);
      const int64_t to = std::min(span.size(), end - begins_[i]);
      if (from < to) BURST_RETURN_IF_ERROR(visit(span, span.begin + from, span.begin + to));
    }
    return absl::OkStatus();
  }

  // Appends the places that `find` finds in each part, as places in this corpus.
  template <typename Find>
  absl::Status Places(int64_t begin, int64_t end, std::vector<int64_t>* places,
                      const Find& find) const {
    return ForEachPart(begin, end, [&](const TokenSpan& span, int64_t from, int64_t to) {
      const size_t before = places->size();
      const absl::Status status = find(span, from, to, places);
      const int64_t moved = begins_[&span - spans_.data()] - span.begin;
      for (size_t i = before; i < places->size(); ++i) (*places)[i] += moved;
      return status;
    });
  }

  const std::vector<TokenSpan> spans_;
  std::vector<int64_t> begins_;  // place of each span in this corpus
  int64_t size_ = 0;
  uint64_t digest_ = 0;
};

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
  joined.corpus = std::make_shared<JoinedCorpus>(
      spans, XXH3_64bits(weights.data(), weights.size() * sizeof(weights[0])));
  return joined;
}

}  // namespace

absl::StatusOr<std::vector<MixturePart>> ParseMixture(const std::string& data) {
  std::vector<MixturePart> parts;
  std::error_code unknown;  // a name may be too long for a file
  const bool there = std::filesystem::exists(data, unknown);
  for (const absl::string_view text : absl::StrSplit(data, ',')) {
    const size_t colon = text.rfind(':');
    MixturePart part;
    if (there || colon == absl::string_view::npos || colon == 0 ||
        !absl::SimpleAtod(text.substr(colon + 1), &part.weight)) {
      return std::vector<MixturePart>{{data, 1}};
    }
    part.path = std::string(text.substr(0, colon));
    if (!std::isfinite(part.weight) || part.weight <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--data: the weight of a part must be positive; got ", text,
                       "; give PATH:WEIGHT,PATH:WEIGHT"));
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::string MixtureText(const std::vector<MixturePart>& parts) {
  if (parts.size() == 1) return parts[0].path;
  return absl::StrJoin(parts, ",", [](std::string* out, const MixturePart& part) {
    absl::StrAppend(out, part.path, ":", part.weight);
  });
}

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
