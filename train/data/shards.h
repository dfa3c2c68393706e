// llm.c's shards: files of 256 int32 (magic number, version, number of tokens, zeros), then uint16
// tokens of GPT-2's vocabulary.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "train/data/input_file.h"
#include "train/data/sources.h"

namespace burst {

// GPT-2's <|endoftext|>, which starts every document.
inline constexpr int32_t kGpt2EndOfText = 50256;
inline constexpr int64_t kGpt2Vocab = 50257;

// A shard whose header was checked. Any thread may read.
class Shard {
 public:
  // InvalidArgument, naming the option and the file, for a file that is none.
  static absl::StatusOr<Shard> Open(const Sources& sources, const SourceFile& file);

  int64_t size() const { return size_; }  // tokens
  const std::string& path() const { return file_.path(); }

  // Tokens [begin, begin + count).
  absl::Status Read(int64_t begin, int64_t count, uint16_t* out) const;

 private:
  Shard(InputFile file, int64_t size) : file_(std::move(file)), size_(size) {}

  InputFile file_;
  int64_t size_;
};

// What a scan of all shards finds.
struct ShardScan {
  std::vector<int32_t> largest;  // token of each shard; -1 in an empty one
  // The first document start after token 0 of the stream that the shards are; -1: none.
  int64_t second_document = -1;
};

// On all threads of the caller's pool; shows progress.
absl::StatusOr<ShardScan> ScanShards(const std::vector<Shard>& shards);

}  // namespace burst
