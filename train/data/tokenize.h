// Writes texts as shards that //train reads, with the tokenizer of a file.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "train/data/document_encoder.h"

namespace burst {

struct TokenizeConfig {
  std::string data;       // files, a folder or a pattern; *.jsonl are lines of JSON
  std::string tokenizer;  // a file, or the folder that holds it
  std::string out;        // the folder to make
  LineFormat lines;
  int64_t shard_tokens = 100000000;
  int64_t val_tokens = 0;  // tokens of the first documents, for validation
  bool separators = true;  // an end-of-text token before every document; with `bos`, after it
  bool bos = false;        // the tokens that the tokenizer's file puts before a text
};

struct TokenizeSummary {
  int64_t documents = 0, bytes = 0, tokens = 0, shards = 0;
  SkippedLines skipped;
};

// Makes the folder `out` with train_000000.bin, ..., the tokenizer's file, and if asked
// val_000000.bin, .... The folder gets its name when it is complete and on the disk. Until then it
// is `out`.part, which the next call removes if the process is killed. Works on all threads of the
// caller's pool and shows progress. Errors name the option.
absl::StatusOr<TokenizeSummary> TokenizeToShards(const TokenizeConfig& config);

}  // namespace burst
