// A corpus: one long stream of tokens, and the places where its documents start. It stays in files,
// which all processes of a host read through the kernel's page cache. A process holds no copy.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/json_line.h"
#include "train/data/tokenizer.h"

namespace burst {

// A corpus, which any thread may read.
class Corpus {
 public:
  virtual ~Corpus() = default;
  virtual int64_t size() const = 0;

  // Copies tokens [begin, begin + count) to out. DataLoss names a file that is damaged or has
  // become shorter since it was opened.
  virtual absl::Status Read(int64_t begin, int64_t count, int32_t* out) const = 0;

  // Appends the positions in [begin, end) where a document starts, increasing.
  virtual absl::Status DocumentStarts(int64_t begin, int64_t end,
                                      std::vector<int64_t>* starts) const = 0;

  // Says that the token at `start`, a document's first, is the end of the document before it.
  virtual bool StartEndsADocument(int64_t /*start*/) const { return false; }

  // Says that marks of the tokens decide which of them count in the loss. Otherwise all do, except
  // that with packed documents the first of a document counts only if it ends another document.
  virtual bool has_marks() const { return false; }
  // Appends the positions in [begin, end) of tokens that do not count by their marks, increasing.
  virtual absl::Status NotCounted(int64_t /*begin*/, int64_t /*end*/,
                                  std::vector<int64_t>* /*places*/) const {
    return absl::OkStatus();
  }

  // Returns the first document start after token 0; size() if there is only one document.
  virtual int64_t second_document() const = 0;

  // Returns a hash of all tokens, of the starts of documents, and of the tokens' meaning where the
  // corpus knows it. Other data has another hash, except with a chance of 2^-64.
  virtual uint64_t digest() const = 0;

  // Checks that all tokens are below `vocab`. InvalidArgument names the file and the place.
  virtual absl::Status CheckVocab(int64_t vocab) const = 0;
};

// A part of a corpus.
struct TokenSpan {
  // A part of a mixture, in the corpus, and its share of the sequences.
  struct Part {
    int64_t begin = 0, end = 0;
    double weight = 1;
  };

  std::shared_ptr<const Corpus> corpus;
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<Part> mixture = {};  // empty: sequences come from the whole span

  int64_t size() const { return end - begin; }
};

struct TrainingData {
  TokenSpan train, validation;
  std::optional<Tokenizer> tokenizer;  // none for shards, unless given
  int64_t vocab = 0;                   // the tokenizer's size, or the shards' number
  int32_t end_of_text = -1;            // the token that ends or separates documents; -1: none
  bool has_documents = false;          // a document starts inside of the training part
  std::string summary;                 // "4,298,239 characters of kjv.txt, 73 tokens (char)"
};

// A part of a mixture, such as --data=web:0.7,books:0.3, and its share of the sequences. It is
// positive; the sum need not be 1.
struct MixturePart {
  std::string path;
  double weight = 1;
};

// Splits PATH:WEIGHT,PATH:WEIGHT. Other texts, and paths that are there, are one part. Errors name
// the option.
absl::StatusOr<std::vector<MixturePart>> ParseMixture(const std::string& data);

// Returns the text of parts, which ParseMixture reads.
std::string MixtureText(const std::vector<MixturePart>& parts);

// Loads training data. `data` names a text file, a folder whose files are documents (in order of
// path), or files named .jsonl whose lines are documents. Or it names llm.c's .bin shards, or is a
// pattern of files of one of these kinds, or a mixture of them (MixturePart). Blank lines separate
// the documents of a single text file. `validation_data` is like it; empty: the last tenth of the
// tokens. `tokenizer` is for text; characters by default. `vocabulary` replaces it by a file's or a
// model's tokenizer, which must have made the shards. `lines` says how lines of JSON are read.
// Errors name the option and the file.
//
// `cache_folder` (data_cache.h) keeps what is computed from the data: the tokens of texts, and the
// results of a scan of shards. So only the first of all processes and runs reads all of the data.
absl::StatusOr<TrainingData> LoadTrainingData(const std::string& data,
                                              const std::string& validation_data,
                                              std::optional<Tokenizer::Kind> tokenizer,
                                              const std::string& cache_folder,
                                              const Tokenizer* vocabulary = nullptr,
                                              const LineFormat& lines = {});

// Returns InvalidArgument that names the option if a span has only end-of-text tokens, or tokens
// that do not count, which teach nothing.
absl::Status CheckTeaches(absl::string_view option, const TokenSpan& span, int32_t end_of_text);

}  // namespace burst
