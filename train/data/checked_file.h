// A file that is written once, and whose bytes are checked when they are read. A block of 64 KiB
// has a checksum (XXH3), which is compared when the block is read first. So a file of any size
// opens at once, and bytes that the disk damaged are found.
//
//   payload | a checksum for each block | description | footer (their sizes, and a checksum of the
//   checksums, the description and the sizes)
//
// The footer is last, so a file that was cut off anywhere has no footer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/input_file.h"

namespace burst {

class CheckedFile {
 public:
  // Opens a file. Returns NotFound if it is missing, and DataLoss that says why it is not whole.
  static absl::StatusOr<std::unique_ptr<const CheckedFile>> Open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::string& description() const { return description_; }
  int64_t payload_bytes() const { return payload_bytes_; }
  uint64_t checksum() const { return checksum_; }  // covers the payload and the description

  // Reads [offset, offset + bytes) of the payload, on any thread. DataLoss means that the file has
  // other bytes than those written.
  absl::Status Read(int64_t offset, int64_t bytes, void* out) const;

 private:
  explicit CheckedFile(InputFile file) : file_(std::move(file)) {}
  absl::Status ReadFooter();
  absl::Status CheckBlock(int64_t block) const;

  InputFile file_;
  int64_t payload_bytes_ = 0;
  uint64_t checksum_ = 0;
  std::vector<uint64_t> checksums_;
  mutable std::vector<std::atomic<bool>> checked_;
  std::string description_;
};

// Writes a checked file under a temporary name, and gives it its name when it is complete. An
// incomplete file is removed.
class CheckedFileWriter {
 public:
  // Makes a file named PREFIX and a unique suffix.
  static absl::StatusOr<std::unique_ptr<CheckedFileWriter>> Create(const std::string& prefix);
  ~CheckedFileWriter();
  CheckedFileWriter(const CheckedFileWriter&) = delete;

  // Any thread may write any part of the payload, in any order.
  absl::Status Write(int64_t offset, const void* data, int64_t bytes);
  // Returns the error of a Write, if one has failed.
  absl::Status write_error() const;

  // Ends the file, whose payload is the bytes written, [0, payload_bytes). Computes the checksums
  // on the caller's thread pool, flushes the file to the disk and renames it to `path`. While the
  // payload is read, one thread at a time calls advanced(bytes).
  absl::Status Finish(int64_t payload_bytes, absl::string_view description, const std::string& path,
                      const std::function<void(int64_t)>& advanced);

 private:
  CheckedFileWriter(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;
  mutable std::mutex mutex_;
  absl::Status write_error_;
};

}  // namespace burst
