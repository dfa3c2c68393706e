// Writes tokens into shards (shards.h): FOLDER/NAME_000000.bin, FOLDER/NAME_000001.bin, ...
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/cli/files.h"
#include "train/data/shards.h"

namespace burst {

// Each file gets its name when it is complete and on the disk.
class ShardWriter {
 public:
  // Files of `shard_tokens` tokens, the last one of what is left. `prefix`: FOLDER/NAME.
  ShardWriter(std::string prefix, const ShardHeader& header, int64_t shard_tokens)
      : prefix_(std::move(prefix)), header_(header), shard_tokens_(shard_tokens) {}

  absl::Status Append(absl::Span<const int32_t> tokens);
  absl::Status Finish();

  int64_t shards() const { return shards_; }
  int64_t tokens() const { return tokens_; }

 private:
  const std::string prefix_;
  ShardHeader header_;  // of the file being written
  const int64_t shard_tokens_;
  std::optional<AtomicFile> file_;
  int64_t shards_ = 0, tokens_ = 0;
};

}  // namespace burst
