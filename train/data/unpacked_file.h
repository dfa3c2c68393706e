// The content of a file, read once from its beginning to its end. Files that gzip or zstd packed
// are unpacked; their first bytes say so, whatever their name is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "train/data/input_file.h"

namespace burst {

class UnpackedFile {
 public:
  // Takes a file that is open. Returns an error of its first bytes.
  static absl::StatusOr<std::unique_ptr<UnpackedFile>> Open(InputFile file);
  virtual ~UnpackedFile() = default;

  // Appends up to `bytes` bytes to `out`, fewer only at the end. DataLoss names the file if it is
  // damaged or was cut off.
  absl::Status Read(int64_t bytes, std::string* out);

  bool packed() const { return packed_; }
  // Returns how many bytes of the file itself were read.
  int64_t input_bytes() const { return offset_; }

 protected:
  UnpackedFile(InputFile file, bool packed) : file_(std::move(file)), packed_(packed) {}

  // Unpacks into `out` from `input_`, and removes what it used. Returns the bytes written.
  virtual absl::StatusOr<int64_t> Unpack(int64_t bytes, char* out) = 0;
  // Returns whether a packed stream ended with the last byte that was unpacked.
  virtual bool Complete() const = 0;
  absl::Status Damaged(const char* what) const;

  std::string input_;  // bytes of the file that are not unpacked yet

 private:
  absl::Status Refill();

  InputFile file_;
  const bool packed_;
  int64_t offset_ = 0;
};

}  // namespace burst
