// Reads llm.c's shards: files of 256 int32, then the tokens. A corpus of shards leaves the tokens
// in their files.
//
//   int32      version 1            version 7
//   0          20240520             20240801, the magic number
//   1          1                    7
//   2          the number of tokens
//   3          the size of the vocabulary, or 0
//   4          where that is not 0: the end-of-text token, which starts every document, or -1
//   5          1: a file of marks belongs to it (token_marks.h); else 0
//   6          1: documents end with a token of their own, before the next document's first; else 0
//   tokens     uint16               uint32
//
// llm.c writes 0 from the fourth number on and does not read them. It means GPT-2's vocabulary by
// version 1 and Llama 3's by version 7; so does a shard here without a size.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "train/data/corpus.h"
#include "train/data/data_cache.h"
#include "train/data/input_file.h"
#include "train/data/sources.h"
#include "train/data/token_marks.h"

namespace burst {

// The token <|endoftext|> of GPT-2.
inline constexpr int32_t kGpt2EndOfText = 50256;
inline constexpr int64_t kGpt2Vocab = 50257;
// The token <|begin_of_text|> of Llama 3, by which llm.c separates documents.
inline constexpr int32_t kLlama3BeginOfText = 128000;
inline constexpr int64_t kLlama3Vocab = 128256;

inline constexpr int64_t kShardHeaderBytes = 256 * sizeof(int32_t);

// The values of a shard's header.
struct ShardHeader {
  int64_t tokens = 0;
  int token_bytes = 2;  // 2 or 4
  int64_t vocab = kGpt2Vocab;
  int32_t end_of_text = kGpt2EndOfText;  // -1: none
  bool marked = false;                   // a file of marks says which tokens count
  bool closed = false;  // documents end with a token of their own; a start ends none

  // Returns version 1's header for a vocabulary of up to 65,536 tokens, otherwise version 7's.
  static ShardHeader For(int64_t vocab, int32_t end_of_text);
  std::vector<int32_t> Numbers() const;  // all 256
};

// A shard whose header was checked, and which any thread may read.
class Shard {
 public:
  // Opens a shard. InvalidArgument names the option and the file if it is not a shard.
  static absl::StatusOr<Shard> Open(const Sources& sources, const SourceFile& file);

  int64_t size() const { return header_.tokens; }
  const ShardHeader& header() const { return header_; }
  const std::string& path() const { return file_.path(); }

  // Reads tokens [begin, begin + count). A token of 32 bits beyond any vocabulary becomes
  // INT32_MAX.
  absl::Status Read(int64_t begin, int64_t count, int32_t* out) const;

  // Returns the marks of the tokens; null: all count, and a document begins at an end of text.
  const MarksFile* marks() const { return marks_.has_value() ? &*marks_ : nullptr; }

 private:
  Shard(InputFile file, const ShardHeader& header) : file_(std::move(file)), header_(header) {}

  InputFile file_;
  ShardHeader header_;
  std::optional<MarksFile> marks_;
};

struct ShardData {
  std::shared_ptr<const Corpus> corpus;
  int64_t vocab = 0;         // the size of the tokenizer that made them
  int32_t end_of_text = -1;  // -1: none
};

// Opens shards. In order they are one stream, and a document starts at every end-of-text token.
absl::StatusOr<ShardData> OpenShards(const Sources& sources, const DataCache& cache);

}  // namespace burst
