// Files and paths, with errors that say which file and why.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

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

// The most bytes that are read of a file of each kind.
inline constexpr int64_t kMaxFileBytes = int64_t{4} << 30;         // rows of metrics
inline constexpr int64_t kMaxSettingsBytes = int64_t{1} << 20;     // config.json, options
inline constexpr int64_t kMaxTokenizerBytes = int64_t{100} << 20;  // also an index of tensors

// Reads a regular file. Links are followed. InvalidArgument for a pipe, whose writer would be
// waited for, for a device, and for more than max_bytes.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes = kMaxFileBytes);

// Replaces `path` by a file with this content. A reader (or a crash) sees the old file or the new
// one, never a mixture. The content is written to a temporary file in the same folder, flushed to
// the disk and renamed. `mode`: its permissions, less the process's umask.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view content,
                                 mode_t mode = 0644);

// Copies a regular file with its permissions, less the process's umask. Errors: those of ReadFile
// and WriteFileAtomically.
absl::Status CopyFileAtomically(const std::string& from, const std::string& to, int64_t max_bytes);

// Makes `path` another name of the file `existing` (a hard link), in place of what it was before:
// a reader sees the one or the other. Unimplemented where the file system has no hard links.
absl::Status LinkAtomically(const std::string& existing, const std::string& path);

// Flushes the names in a folder to the disk: what was made, renamed or removed there.
absl::Status SyncFolder(const std::string& folder);

// FailedPrecondition where `path` no longer leads to the file that `fd` was opened as.
absl::Status CheckStillNamed(int fd, const std::string& path);

// Removes temporary files that killed processes left in a folder. is_ours(name) tells whether files
// of this name are meant. No process may be replacing such a file now: the caller holds a lock.
absl::Status RemoveTemporaries(const std::string& folder,
                               const std::function<bool(absl::string_view name)>& is_ours);

// A file that is being written as `path`.<pid>-<number>.tmp, a name that no other process or object
// writes to. Commit renames it to `path`. Without Commit it is removed.
class AtomicFile {
 public:
  static absl::StatusOr<AtomicFile> Create(const std::string& path, mode_t mode = 0644);
  AtomicFile(AtomicFile&& other);
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  absl::Status Write(const void* data, int64_t bytes);
  // Over bytes that were written before; Write continues where it was.
  absl::Status WriteAt(int64_t offset, const void* data, int64_t bytes);
  absl::Status Commit();

 private:
  explicit AtomicFile(std::string path) : path_(std::move(path)) {}

  std::string path_, temporary_;
  int fd_ = -1;
};

}  // namespace burst
