// llm.c's shards: files of 256 int32, then the tokens.
//
//   int32      version 1            version 7
//   0          20240520             20240801, the magic number
//   1          1                    7
//   2          the number of tokens
//   3          the size of the vocabulary, or 0
//   4          where that is not 0: the end-of-text token, which starts every document, or -1
//   tokens     uint16               uint32
//
// llm.c writes 0 from the fourth number on and does not read them. It means GPT-2's vocabulary by
// version 1 and Llama 3's by version 7; so does a shard here without a size.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "train/data/input_file.h"
#include "train/data/sources.h"

namespace burst {

// GPT-2's <|endoftext|>.
inline constexpr int32_t kGpt2EndOfText = 50256;
inline constexpr int64_t kGpt2Vocab = 50257;
// Llama 3's <|begin_of_text|>, by which llm.c separates documents.
inline constexpr int32_t kLlama3BeginOfText = 128000;
inline constexpr int64_t kLlama3Vocab = 128256;

inline constexpr int64_t kShardHeaderBytes = 256 * sizeof(int32_t);

// The values of a shard's header.
struct ShardHeader {
  int64_t tokens = 0;
  int token_bytes = 2;  // 2 or 4
  int64_t vocab = kGpt2Vocab;
  int32_t end_of_text = kGpt2EndOfText;  // -1: none

  // For a vocabulary of up to 65,536 tokens that of version 1, otherwise that of version 7.
  static ShardHeader For(int64_t vocab, int32_t end_of_text);
  std::vector<int32_t> Numbers() const;  // all 256
};

// A shard whose header was checked. Any thread may read.
class Shard {
 public:
  // InvalidArgument, naming the option and the file, if the file is not a shard.
  static absl::StatusOr<Shard> Open(const Sources& sources, const SourceFile& file);

  int64_t size() const { return header_.tokens; }
  const ShardHeader& header() const { return header_; }
  const std::string& path() const { return file_.path(); }

  // Tokens [begin, begin + count). A token of 32 bits that no vocabulary has is INT32_MAX.
  absl::Status Read(int64_t begin, int64_t count, int32_t* out) const;

 private:
  Shard(InputFile file, const ShardHeader& header) : file_(std::move(file)), header_(header) {}

  InputFile file_;
  ShardHeader header_;
};

// The results of a scan of all shards.
struct ShardScan {
  std::vector<int32_t> largest;  // token of each shard; -1 in an empty one
  // The first document start after token 0 of the stream that the shards are; -1: none.
  int64_t second_document = -1;
  uint64_t digest = 0;  // of all tokens and of which shard they are in
};

// On all threads of the caller's pool; shows progress. All have one vocabulary.
absl::StatusOr<ShardScan> ScanShards(const std::vector<Shard>& shards);

}  // namespace burst
