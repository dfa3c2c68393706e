// A file that several threads read at any place.
//
// It is read through the kernel's page cache, which all processes of a host share, and is not
// mapped. So a file that becomes shorter, or that the disk cannot read, is an error and not a
// signal.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace burst {

// An identity that changes when a file's content is changed or the file is replaced.
struct FileIdentity {
  int64_t bytes = 0;
  int64_t modified_ns = 0, changed_ns = 0;  // times since 1970: of the content; also of attributes
  uint64_t inode = 0;

  friend bool operator==(const FileIdentity& a, const FileIdentity& b) {
    return a.bytes == b.bytes && a.modified_ns == b.modified_ns && a.changed_ns == b.changed_ns &&
           a.inode == b.inode;
  }
};

// Returns a file's identity, and follows links. InvalidArgument means that it is a folder, a pipe
// or a device.
absl::StatusOr<FileIdentity> IdentityOf(const std::string& path);

class InputFile {
 public:
  static absl::StatusOr<InputFile> Open(const std::string& path);
  InputFile(InputFile&& other);
  InputFile& operator=(InputFile&& other);
  ~InputFile();

  const std::string& path() const { return path_; }
  // Returns the size when the file was opened.
  int64_t size() const { return identity_.bytes; }
  const FileIdentity& identity() const { return identity_; }

  // Reads `bytes` bytes at `offset`. DataLoss means that the file ends before.
  absl::Status ReadAt(int64_t offset, int64_t bytes, void* out) const;

 private:
  InputFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_ = -1;
  FileIdentity identity_;
};

}  // namespace burst
