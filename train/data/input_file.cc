#include "train/data/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {
namespace {

absl::Status SystemError(const std::string& path) {
  const std::string message = absl::StrCat(path, ": ", strerror(errno));
  const bool missing = errno == ENOENT || errno == ENOTDIR;
  return missing ? absl::NotFoundError(message) : absl::InternalError(message);
}

absl::StatusOr<FileIdentity> RegularFile(const std::string& path, const struct stat& info) {
  if (!S_ISREG(info.st_mode)) {
    const char* kind = S_ISDIR(info.st_mode)    ? "a folder"
                       : S_ISFIFO(info.st_mode) ? "a pipe"
                       : S_ISSOCK(info.st_mode) ? "a socket"
                                                : "a device";
    return absl::InvalidArgumentError(absl::StrCat(path, " is ", kind, ", not a file"));
  }
  constexpr int64_t kSecond = 1000000000;
  FileIdentity identity;
  identity.bytes = info.st_size;
  identity.modified_ns = int64_t{info.st_mtim.tv_sec} * kSecond + info.st_mtim.tv_nsec;
  identity.changed_ns = int64_t{info.st_ctim.tv_sec} * kSecond + info.st_ctim.tv_nsec;
  identity.inode = info.st_ino;
  return identity;
}

}  // namespace

absl::StatusOr<FileIdentity> IdentityOf(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return SystemError(path);
  return RegularFile(path, info);
}

absl::StatusOr<InputFile> InputFile::Open(const std::string& path) {
  // Without O_NONBLOCK, the opening of a pipe would wait for its writer.
  InputFile file(path, open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (file.fd_ < 0 || fstat(file.fd_, &info) != 0) return SystemError(path);
  BURST_ASSIGN_OR_RETURN(file.identity_, RegularFile(path, info));
  return file;
}

InputFile::InputFile(InputFile&& other)
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      identity_(other.identity_) {}

InputFile& InputFile::operator=(InputFile&& other) {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(identity_, other.identity_);
  return *this;
}

InputFile::~InputFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status InputFile::ReadAt(int64_t offset, int64_t bytes, void* out) const {
  char* at = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t n = pread(fd_, at, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError(path_);
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(path_, " ends at byte ", offset, "; it had ", size(),
                                              " bytes when it was opened"));
    }
    at += n, bytes -= n, offset += n;
  }
  return absl::OkStatus();
}

}  // namespace burst
