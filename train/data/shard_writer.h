// Writes tokens into shards (shards.h): FOLDER/NAME_000000.bin, FOLDER/NAME_000001.bin, ..., and
// files of marks (token_marks.h)
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/cli/files.h"
#include "train/data/shards.h"

namespace burst {

// Writes shards. Each file gets its name when it is complete and on the disk.
class ShardWriter {
 public:
  // Files have `shard_tokens` tokens, the last one the rest. `prefix` is FOLDER/NAME.
  ShardWriter(std::string prefix, const ShardHeader& header, int64_t shard_tokens)
      : prefix_(std::move(prefix)), header_(header), shard_tokens_(shard_tokens) {}

  // `marks` has the bits of each token (token_marks.h). With `masked`, the current shard gets a
  // file of marks.
  absl::Status Append(absl::Span<const int32_t> tokens, absl::Span<const uint8_t> marks,
                      bool masked);
  absl::Status Finish();

  int64_t shards() const { return shards_; }
  int64_t tokens() const { return tokens_; }

 private:
  std::string Path() const;
  absl::Status WriteMarks() const;

  const std::string prefix_;
  ShardHeader header_;  // the current file's header
  const int64_t shard_tokens_;
  std::optional<AtomicFile> file_;
  TokenMarks marks_;  // the current file's
  int64_t shards_ = 0, tokens_ = 0;
};

}  // namespace burst
