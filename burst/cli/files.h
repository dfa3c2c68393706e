// Files and paths, with errors that say which file and why.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

// `path` as the user means it: relative to where `bazel run` was called, not to where it starts the
// program. Empty stays empty.
std::string ResolvePath(const std::string& path);

// A file among the program's run-time data, e.g. "kjv/kjv.txt" (repository, then path), both under
// `bazel run` and when the binary in bazel-bin is started by hand.
absl::StatusOr<std::string> FindRunfile(absl::string_view path);

absl::StatusOr<std::string> ReadFile(const std::string& path);

// Replaces `path` by a file with this content, so that a reader (or a crash) sees the old file or
// the new one and nothing between: written beside it, flushed to the disk, renamed.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view content);

// A file being written under `path`.tmp; Commit makes it `path`. Not committed, it is removed.
class AtomicFile {
 public:
  static absl::StatusOr<AtomicFile> Create(const std::string& path);
  AtomicFile(AtomicFile&& other);
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  absl::Status Write(const void* data, int64_t bytes);
  absl::Status Commit();

 private:
  AtomicFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::string temporary() const { return path_ + ".tmp"; }

  std::string path_;
  int fd_ = -1;
};

}  // namespace burst
