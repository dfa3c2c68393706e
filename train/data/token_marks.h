// Marks of tokens, two bits each: whether it counts in the loss, and whether a document begins.
//
// A file of marks has the name of its shard, with .marks in place of .bin:
//
//   int32      0x4B52414D ("MARK"), the magic number
//   int32      1, the version
//   int64      the number of tokens
//   bits       token i has the bits 2 (i mod 4) and the next one of byte i / 4; the low bit says
//   that
//              it counts, the high one that a document begins
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "train/data/input_file.h"

namespace burst {

// The bits of a token's mark.
inline constexpr uint8_t kCounts = 1, kBegins = 2;

// The packed marks of a stream of tokens, in memory.
class TokenMarks {
 public:
  void Append(uint8_t mark) {
    if (size_ % 4 == 0) bytes_.push_back(0);
    bytes_.back() = static_cast<uint8_t>(bytes_.back() | mark << (2 * (size_ % 4)));
    ++size_;
  }
  void Clear() { bytes_.clear(), size_ = 0; }
  int64_t size() const { return size_; }
  const std::vector<uint8_t>& bytes() const { return bytes_; }

  // Returns the bytes that hold `size` marks.
  static int64_t BytesOf(int64_t size) { return (size + 3) / 4; }
  // Returns the mark of token i.
  static uint8_t At(const uint8_t* bytes, int64_t i) { return bytes[i / 4] >> (2 * (i % 4)) & 3; }

 private:
  std::vector<uint8_t> bytes_;
  int64_t size_ = 0;
};

// Returns the name of a shard's file of marks.
std::string MarksPath(const std::string& shard_path);

// Returns the first bytes of a file of marks.
std::string MarksHeader(int64_t tokens);

// The marks of a shard. Any thread may read them.
class MarksFile {
 public:
  // Opens the file of a shard of `tokens` tokens. InvalidArgument names a file that is not its.
  static absl::StatusOr<MarksFile> Open(const std::string& path, int64_t tokens);

  // Copies the marks of tokens [begin, begin + count).
  absl::Status Read(int64_t begin, int64_t count, uint8_t* out) const;
  const FileIdentity& identity() const { return file_.identity(); }

 private:
  explicit MarksFile(InputFile file) : file_(std::move(file)) {}

  InputFile file_;
};

}  // namespace burst
