// A corpus: one long stream of tokens, and where its documents start. It stays in files, which all
// processes of a host read through the kernel's page cache; a process holds no copy.
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

// Any thread may read.
class Corpus {
 public:
  virtual ~Corpus() = default;
  virtual int64_t size() const = 0;

  // Copies tokens [begin, begin + count) to out. DataLoss, naming the file, where it is damaged or
  // has become shorter since it was opened.
  virtual absl::Status Read(int64_t begin, int64_t count, int32_t* out) const = 0;

  // Appends the positions in [begin, end) where a document starts, increasing.
  virtual absl::Status DocumentStarts(int64_t begin, int64_t end,
                                      std::vector<int64_t>* starts) const = 0;

  // The token that is the first of every document, so that it ends the document before, and that is
  // nowhere else; -1: there is none.
  virtual int32_t separator() const = 0;

  // The first document start after token 0; size() if there is none.
  virtual int64_t second_document() const = 0;

  // A hash of all tokens and of where documents start, and of what the tokens are where the corpus
  // knows it. Other data has another one, but for a chance of 2^-64.
  virtual uint64_t digest() const = 0;

  // InvalidArgument, naming the file and the place, for a token that is not below `vocab`.
  virtual absl::Status CheckVocab(int64_t vocab) const = 0;
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
  std::optional<Tokenizer> tokenizer;  // none for shards, unless given
  int64_t vocab = 0;                   // of the tokenizer, or what shards say
  int32_t end_of_text = -1;            // what ends or separates documents; -1: nothing does
  bool has_documents = false;          // there is a boundary inside the training part
  std::string summary;                 // "4,298,239 characters of kjv.txt, 73 tokens (char)"
};

// `data` names a text file, a folder whose files are documents (in order of path), or files named
// .jsonl whose lines are documents. Or it names llm.c's .bin shards, or is a pattern of files of
// one of these kinds. Blank lines separate the documents of a single text file. `validation_data`
// is like it; empty: the last tenth of the tokens. `tokenizer` is for text; characters by default.
// `vocabulary` replaces it by the tokenizer of a file or of a model, with which shards must have
// been made. `field` is the key of the text in lines of JSON. Errors name the option and the file.
//
// What has to be computed from the data is kept in `cache_folder` (data_cache.h): the tokens of
// texts; of shards, which have tokens, what a scan finds. So only the first of all processes and
// runs reads all of the data.
absl::StatusOr<TrainingData> LoadTrainingData(const std::string& data,
                                              const std::string& validation_data,
                                              std::optional<Tokenizer::Kind> tokenizer,
                                              const std::string& cache_folder,
                                              const Tokenizer* vocabulary = nullptr,
                                              const std::string& field = "text");

// InvalidArgument, naming the option, where a span has no token but the end of text: nothing can be
// learned from it.
absl::Status CheckTeaches(absl::string_view option, const TokenSpan& span, int32_t end_of_text);

}  // namespace burst
