#include "train/data/text_corpus.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "train/data/text_check.h"
#include "train/data/text_encoder.h"
#include "train/data/token_marks.h"
#include "train/data/vocabulary_texts.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// The version of the file's format and of the tokens of bytes and of characters. A run continues
// with files of its own version alone.
constexpr int kVersion = 5;
// The version of the tokens of tokenizers' files. Increase it when a tokenizer gives other tokens.
// A run continues after that if its own tokens stay.
constexpr int kTokensVersion = 2;

// The description leaves out the tokenizer of a file, which is given and part of the cache file's
// name.
std::string Describe(const EncodedTexts& texts) {
  const bool given = texts.tokenizer.of_file() != nullptr;
  Json json = {{"version", kVersion},
               {"token_bytes", texts.token_bytes},
               {"tokenizer", given ? "" : texts.tokenizer.ToJson()}};
  for (const EncodedText& part : texts.parts) {
    json["parts"].push_back(
        {part.tokens_at, part.tokens, part.starts_at, part.starts, part.marks_at});
  }
  return json.dump();
}

absl::StatusOr<EncodedTexts> ParseDescription(const CheckedFile& file, size_t num_parts,
                                              const Tokenizer* given) {
  const auto bad = [&] {
    return absl::DataLossError(
        absl::StrCat(file.path(), " is damaged: not the description of encoded texts"));
  };
  const Json json = Json::parse(file.description(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("version", Json()) != kVersion) return bad();
  const Json tokenizer = json.value("tokenizer", Json()), parts = json.value("parts", Json());
  const Json token_bytes = json.value("token_bytes", Json());
  if (token_bytes != 2 && token_bytes != 4) return bad();
  if (!tokenizer.is_string() || !parts.is_array() || parts.size() != num_parts) return bad();
  absl::StatusOr<Tokenizer> parsed = given != nullptr
                                         ? absl::StatusOr<Tokenizer>(*given)
                                         : Tokenizer::FromJson(tokenizer.get<std::string>());
  BURST_RETURN_IF_ERROR(parsed.status());
  EncodedTexts texts{*std::move(parsed), {}, file.payload_bytes(), token_bytes};
  const auto fits = [&](int64_t at, int64_t count, int64_t size) {
    return at >= 0 && count >= 0 && at <= texts.payload_bytes &&
           count <= (texts.payload_bytes - at) / size;
  };
  for (const Json& part : parts) {
    if (!part.is_array() || part.size() != 5) return bad();
    for (const Json& number : part) {
      if (!number.is_number_integer()) return bad();
    }
    const EncodedText text{part[0], part[1], part[2], part[3], part[4]};
    if (!fits(text.tokens_at, text.tokens, texts.token_bytes) || text.starts < 1 ||
        !fits(text.starts_at, text.starts, sizeof(int64_t)) ||
        !fits(text.marks_at, TokenMarks::BytesOf(text.marks_at == 0 ? 0 : text.tokens), 1)) {
      return bad();
    }
    texts.parts.push_back(text);
  }
  return texts;
}

class TextCorpus : public Corpus {
 public:
  static absl::StatusOr<std::shared_ptr<const Corpus>> Create(
      std::shared_ptr<const CheckedFile> file, const EncodedText& text, int token_bytes) {
    std::shared_ptr<TextCorpus> corpus(new TextCorpus(std::move(file), text, token_bytes));
    corpus->second_document_ = corpus->size();
    if (text.starts > 1) {
      BURST_ASSIGN_OR_RETURN(corpus->second_document_, corpus->Start(1));
    }
    return std::shared_ptr<const Corpus>(std::move(corpus));
  }

  int64_t size() const override { return text_.tokens; }
  // The file holds all parts of the data, so the digest includes this part's place.
  uint64_t digest() const override {
    const uint64_t place[] = {file_->checksum(), static_cast<uint64_t>(text_.tokens_at),
                              static_cast<uint64_t>(text_.tokens)};
    return XXH3_64bits(place, sizeof(place));
  }
  int64_t second_document() const override { return second_document_; }
  // Nothing needs a check: the model's vocabulary holds the tokenizer's.
  absl::Status CheckVocab(int64_t) const override { return absl::OkStatus(); }

  absl::Status Read(int64_t begin, int64_t count, int32_t* out) const override {
    BURST_CHECK(0 <= begin && begin + count <= size())
        << "tokens [" << begin << ", " << begin + count << ") of " << size();
    if (token_bytes_ == 4) return ReadFile(text_.tokens_at + 4 * begin, 4 * count, out);
    std::vector<uint16_t> tokens(count);
    BURST_RETURN_IF_ERROR(ReadFile(text_.tokens_at + 2 * begin, 2 * count, tokens.data()));
    std::copy(tokens.begin(), tokens.end(), out);
    return absl::OkStatus();
  }

  absl::Status DocumentStarts(int64_t begin, int64_t end,
                              std::vector<int64_t>* starts) const override {
    BURST_ASSIGN_OR_RETURN(const int64_t first, FirstStartFrom(begin));
    BURST_ASSIGN_OR_RETURN(const int64_t last, FirstStartFrom(end));
    if (first >= last) return absl::OkStatus();
    const size_t before = starts->size();
    starts->resize(before + last - first);
    return ReadFile(text_.starts_at + first * kStart, (last - first) * kStart,
                    starts->data() + before);
  }

  bool has_marks() const override { return text_.marks_at > 0; }
  absl::Status NotCounted(int64_t begin, int64_t end, std::vector<int64_t>* places) const override {
    end = std::min(end, size());
    if (begin >= end) return absl::OkStatus();
    const int64_t first = begin / 4;
    std::vector<uint8_t> bytes(TokenMarks::BytesOf(end) - first);
    BURST_RETURN_IF_ERROR(
        ReadFile(text_.marks_at + first, static_cast<int64_t>(bytes.size()), bytes.data()));
    for (int64_t at = begin; at < end; ++at) {
      if ((TokenMarks::At(bytes.data(), at - 4 * first) & kCounts) == 0) places->push_back(at);
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kStart = sizeof(int64_t);

  TextCorpus(std::shared_ptr<const CheckedFile> file, const EncodedText& text, int token_bytes)
      : file_(std::move(file)), text_(text), token_bytes_(token_bytes) {}

  // Reads from the file. A damaged file is removed, so that the next start makes it anew.
  absl::Status ReadFile(int64_t offset, int64_t bytes, void* out) const {
    const absl::Status status = file_->Read(offset, bytes, out);
    if (!absl::IsDataLoss(status)) return status;
    unlink(file_->path().c_str());
    return absl::DataLossError(absl::StrCat("--data_cache: ", status.message(),
                                            "; it was removed, and the next start makes it anew"));
  }

  absl::StatusOr<int64_t> Start(int64_t number) const {
    int64_t start = 0;
    BURST_RETURN_IF_ERROR(ReadFile(text_.starts_at + number * kStart, kStart, &start));
    return start;
  }

  // Returns the number of the first start at or after `position`.
  absl::StatusOr<int64_t> FirstStartFrom(int64_t position) const {
    int64_t first = 0, last = text_.starts;
    while (first < last) {
      const int64_t middle = first + (last - first) / 2;
      BURST_ASSIGN_OR_RETURN(const int64_t start, Start(middle));
      if (start < position) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }

  std::shared_ptr<const CheckedFile> file_;
  const EncodedText text_;
  const int token_bytes_;
  int64_t second_document_ = 0;
};

}  // namespace

namespace {

std::string LinesKey(const LineFormat& format) {
  return absl::StrCat(format.field, "\n", NameOf(format.bad_lines, kBadLines));
}

}  // namespace

absl::StatusOr<TextCorpora> OpenTexts(const std::vector<const Sources*>& sources,
                                      Tokenizer::Kind kind, const Tokenizer* vocabulary,
                                      const LineFormat& format, const DataCache& cache) {
  if (vocabulary != nullptr) kind = vocabulary->kind();
  const Tokenizer* const of_file =
      vocabulary != nullptr && vocabulary->of_file() != nullptr ? vocabulary : nullptr;
  // A tokenizer's file is part of the name: the same path may hold another tokenizer tomorrow.
  const std::string tokenizer = vocabulary != nullptr            ? vocabulary->ToJson()
                                : kind == Tokenizer::Kind::kByte ? "byte"
                                                                 : "char";
  const bool lines = sources[0]->json_lines;
  const std::string tokens = of_file != nullptr ? absl::StrCat("tokens ", kTokensVersion, " ") : "";
  const std::string key = absl::StrCat("texts ", kVersion, " ", tokens, tokenizer, "\n",
                                       lines ? LinesKey(format) : "", "\n", Fingerprint(sources));
  const auto check = [&](const CheckedFile& file) {
    return ParseDescription(file, sources.size(), of_file).status();
  };
  const auto encode = [&](CheckedFileWriter* payload) -> absl::StatusOr<EncodedTexts> {
    for (const Sources* source : sources) {
      BURST_RETURN_IF_ERROR(CheckIsText(*source, kind == Tokenizer::Kind::kByte, format.field));
    }
    if (of_file != nullptr) return EncodeVocabularyTexts(sources, *of_file, payload, format);
    if (!lines) return EncodeTexts(sources, kind, payload, int64_t{1} << 20, vocabulary);
    BURST_ASSIGN_OR_RETURN(const Tokenizer made,
                           TokenizerOfLines(sources, kind, format, vocabulary));
    return EncodeVocabularyTexts(sources, made, payload, format);
  };
  const auto make = [&](CheckedFileWriter* payload) -> absl::StatusOr<DataCache::Content> {
    BURST_ASSIGN_OR_RETURN(const EncodedTexts texts, encode(payload));
    return DataCache::Content{texts.payload_bytes, Describe(texts)};
  };
  BURST_ASSIGN_OR_RETURN(std::shared_ptr<const CheckedFile> file, cache.Get(key, check, make));
  BURST_ASSIGN_OR_RETURN(EncodedTexts texts, ParseDescription(*file, sources.size(), of_file));
  TextCorpora result{std::move(texts.tokenizer), {}};
  for (const EncodedText& part : texts.parts) {
    BURST_ASSIGN_OR_RETURN(auto corpus, TextCorpus::Create(file, part, texts.token_bytes));
    result.corpora.push_back(std::move(corpus));
  }
  return result;
}

}  // namespace burst
