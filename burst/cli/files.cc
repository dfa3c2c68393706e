#include "burst/cli/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "burst/base/status.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

absl::Status SystemError(absl::string_view doing, const std::string& path) {
  const std::string message = absl::StrCat("cannot ", doing, " ", path, ": ", strerror(errno));
  switch (errno) {
    case ENOENT:
      return absl::NotFoundError(message);
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::InternalError(message);
  }
}

// Returns a name that no other object of this process uses. A process on another host with the same
// pid can, in rare cases, choose it too.
std::string NextTemporary(const std::string& path) {
  static std::atomic<int64_t> number{0};
  return absl::StrCat(path, ".", getpid(), "-", ++number, ".tmp");
}

// Returns the name of the file that a temporary one would have replaced, or an empty text for other
// names. A temporary's name ends with ".<pid>-<number>.tmp", or with ".tmp" of an older version.
absl::string_view ReplacedName(absl::string_view temporary) {
  if (!absl::ConsumeSuffix(&temporary, ".tmp")) return {};
  const size_t dot = temporary.rfind('.');
  if (dot == absl::string_view::npos) return temporary;
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(temporary.substr(dot + 1), absl::MaxSplits('-', 1));
  int64_t pid = 0, number = 0;
  const bool numbered =
      absl::SimpleAtoi(parts.first, &pid) && absl::SimpleAtoi(parts.second, &number);
  return numbered ? temporary.substr(0, dot) : temporary;
}

absl::Status CheckRegular(const std::string& path, const struct stat& info, int64_t max_bytes) {
  if (!S_ISREG(info.st_mode)) {
    const char* const kind = S_ISDIR(info.st_mode)    ? "a folder"
                             : S_ISFIFO(info.st_mode) ? "a pipe"
                             : S_ISSOCK(info.st_mode) ? "a socket"
                                                      : "a device";
    return absl::InvalidArgumentError(absl::StrCat(path, " is ", kind, ", not a file"));
  }
  if (info.st_size <= max_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(path, " holds ", info.st_size, " bytes; at most ", max_bytes, " are read"));
}

// Appends the file's content. Its size may grow, and /proc gives a size of 0.
absl::Status ReadAll(int fd, const std::string& path, int64_t max_bytes, std::string* content) {
  constexpr size_t kChunk = 1 << 20;
  while (static_cast<int64_t>(content->size()) <= max_bytes) {
    const size_t size = content->size();
    content->resize(size + kChunk);
    const ssize_t n = read(fd, content->data() + size, kChunk);
    const int error = errno;
    content->resize(size + std::max<ssize_t>(n, 0));
    if (n == 0) return absl::OkStatus();
    errno = error;
    if (n < 0 && errno != EINTR) return SystemError("read", path);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, " holds more than ", max_bytes, " bytes; no more are read"));
}

absl::StatusOr<std::string> ReadRegularFile(const std::string& path, int64_t max_bytes,
                                            mode_t* mode) {
  // The open does not block, because a pipe must be refused, not waited for.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return SystemError("read", path);
  struct stat info = {};
  absl::Status status =
      fstat(fd, &info) == 0 ? CheckRegular(path, info, max_bytes) : SystemError("read", path);
  *mode = info.st_mode & 0777;
  std::string content;
  if (status.ok()) status = ReadAll(fd, path, max_bytes, &content);
  close(fd);
  if (!status.ok()) return status;
  return content;
}

}  // namespace

std::string ResolvePath(const std::string& path) {
  const char* working_directory = std::getenv("BUILD_WORKING_DIRECTORY");
  if (path.empty() || fs::path(path).is_absolute()) return path;
  std::error_code error;
  const fs::path base =
      working_directory != nullptr ? fs::path(working_directory) : fs::current_path(error);
  return (base / path).lexically_normal().string();
}

absl::StatusOr<std::string> FindRunfile(absl::string_view path) {
  std::vector<fs::path> roots;
  for (const char* variable : {"RUNFILES_DIR", "TEST_SRCDIR"}) {
    if (const char* value = std::getenv(variable)) roots.emplace_back(value);
  }
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) roots.push_back(program.string() + ".runfiles");
  for (const fs::path& root : roots) {
    const fs::path candidate = root / std::string(path);
    if (fs::exists(candidate, error)) return candidate.string();
  }
  return absl::NotFoundError(
      absl::StrCat(path, " is not next to the program; start it with bazel run"));
}

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t max_bytes) {
  mode_t mode = 0;
  return ReadRegularFile(path, max_bytes, &mode);
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view content, mode_t mode) {
  BURST_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::Create(path, mode));
  BURST_RETURN_IF_ERROR(file.Write(content.data(), static_cast<int64_t>(content.size())));
  return file.Commit();
}

absl::Status CopyFileAtomically(const std::string& from, const std::string& to, int64_t max_bytes) {
  mode_t mode = 0;
  BURST_ASSIGN_OR_RETURN(const std::string content, ReadRegularFile(from, max_bytes, &mode));
  return WriteFileAtomically(to, content, mode);
}

absl::Status LinkAtomically(const std::string& existing, const std::string& path) {
  std::string temporary = NextTemporary(path);
  while (link(existing.c_str(), temporary.c_str()) != 0) {
    const int error = errno;
    const absl::Status status = SystemError("link", path);
    if (error == EPERM || error == EOPNOTSUPP || error == ENOSYS) {
      return absl::UnimplementedError(status.message());
    }
    if (error != EEXIST) return status;
    temporary = NextTemporary(path);
  }
  const bool renamed = rename(temporary.c_str(), path.c_str()) == 0;
  const absl::Status status = renamed ? absl::OkStatus() : SystemError("link", path);
  unlink(temporary.c_str());  // it still exists if both names had one file before
  return status;
}

absl::Status SyncFolder(const std::string& folder) {
  const int fd = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return SystemError("open", folder);
  // EINVAL means a file system that has nothing to flush.
  const absl::Status status =
      fsync(fd) == 0 || errno == EINVAL ? absl::OkStatus() : SystemError("write", folder);
  close(fd);
  return status;
}

absl::Status CheckStillNamed(int fd, const std::string& path) {
  struct stat opened = {}, named = {};
  const bool same = fstat(fd, &opened) == 0 && stat(path.c_str(), &named) == 0 &&
                    opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
  if (same) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(path, " was removed or replaced while this process used it"));
}

absl::Status RemoveTemporaries(const std::string& folder,
                               const std::function<bool(absl::string_view name)>& is_ours) {
  std::error_code error;
  for (fs::directory_iterator entry(folder.empty() ? "." : folder, error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string found = entry->path().filename().string();
    const absl::string_view name = ReplacedName(found);
    if (name.empty() || !is_ours(name)) continue;
    if (unlink(entry->path().c_str()) != 0 && errno != ENOENT) {
      return SystemError("remove", entry->path().string());
    }
  }
  if (!error) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cannot read the folder ", folder, ": ", error.message()));
}

absl::StatusOr<AtomicFile> AtomicFile::Create(const std::string& path, mode_t mode) {
  AtomicFile file(path);
  do {
    file.temporary_ = NextTemporary(path);
    file.fd_ = open(file.temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  } while (file.fd_ < 0 && errno == EEXIST);
  if (file.fd_ < 0) return SystemError("create", path);
  return file;
}

AtomicFile::AtomicFile(AtomicFile&& other)
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      fd_(std::exchange(other.fd_, -1)) {}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(temporary_.c_str());
}

absl::Status AtomicFile::Write(const void* data, int64_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = write(fd_, at, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError("write", path_);
    at += n, bytes -= n;
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::WriteAt(int64_t offset, const void* data, int64_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = pwrite(fd_, at, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError("write", path_);
    at += n, offset += n, bytes -= n;
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Commit() {
  // The content must be on the disk before the name points to it, and the name after that.
  if (fsync(fd_) != 0) return SystemError("write", path_);
  if (close(std::exchange(fd_, -1)) != 0 || rename(temporary_.c_str(), path_.c_str()) != 0) {
    const absl::Status status = SystemError("write", path_);
    unlink(temporary_.c_str());
    return status;
  }
  return SyncFolder(fs::path(path_).parent_path().string());
}

}  // namespace burst
