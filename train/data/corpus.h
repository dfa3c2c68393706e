// A corpus: one long stream of tokens, and where its documents start.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/tokenizer.h"

namespace burst {

// GPT-2's <|endoftext|>, which starts every document of llm.c's shards.
inline constexpr int32_t kGpt2EndOfText = 50256;
inline constexpr int64_t kGpt2Vocab = 50257;

class Corpus {
 public:
  int64_t size() const { return size_; }

  // Copies tokens [begin, begin + count) to out.
  void Read(int64_t begin, int64_t count, int32_t* out) const;

  // Appends the positions in [begin, end) where a document starts, increasing.
  void DocumentStarts(int64_t begin, int64_t end, std::vector<int64_t>* starts) const;

  // InvalidArgument, naming the file and the place, for a token that is not below `vocab`.
  absl::Status CheckVocab(int64_t vocab) const;

 private:
  friend class CorpusBuilder;

  // A file's tokens: read from a shard that stays mapped, or encoded from text.
  struct Piece {
    std::string file;
    int64_t begin = 0;  // position of its first token in the stream
    int64_t size = 0;
    const uint16_t* tokens = nullptr;
    std::shared_ptr<const void> owner;
  };

  std::vector<Piece> pieces_;
  int64_t size_ = 0;
  bool starts_are_tokens_ = false;        // a document starts at every kGpt2EndOfText
  std::vector<int64_t> document_starts_;  // otherwise
};

// A part of a corpus.
struct TokenSpan {
  std::shared_ptr<const Corpus> corpus;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end - begin; }
};

struct TrainingData {
  TokenSpan train, validation;
  std::optional<Tokenizer> tokenizer;  // none for shards
  int64_t vocab = 0;                   // of the tokenizer, or GPT-2's for shards
  bool has_documents = false;          // there is a boundary inside the training part
  std::string summary;                 // "4,298,239 characters of kjv.txt, 73 tokens (char)"
};

// `data`: a text file, a folder whose files are documents (in order of path), llm.c's .bin shards,
// or a glob pattern of files of one of these kinds. Blank lines separate the documents of a single
// text file. `validation_data`: the same; empty: the last tenth of the tokens. `tokenizer`: for
// text only; characters by default. Errors name the option and the file.
absl::StatusOr<TrainingData> LoadTrainingData(const std::string& data,
                                              const std::string& validation_data,
                                              std::optional<Tokenizer::Kind> tokenizer);

}  // namespace burst
