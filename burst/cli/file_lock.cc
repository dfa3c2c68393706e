#include "burst/cli/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"

namespace burst {
namespace {

constexpr size_t kMaxHolder = 400;  // the most bytes of a holder's name

absl::Status CannotLock(const std::string& path, int error) {
  const std::string message = absl::StrCat("cannot lock ", path, ": ", strerror(error));
  if (error == ENOSYS || error == EOPNOTSUPP || error == ENOLCK) {
    return absl::UnimplementedError(message);
  }
  if (error == ENOENT) return absl::NotFoundError(message);
  return absl::FailedPreconditionError(message);
}

// Returns one line that can be printed, for any bytes.
std::string Printable(std::string text) {
  text.resize(std::min(text.size(), kMaxHolder));
  for (char& c : text) {
    if (!absl::ascii_isprint(static_cast<unsigned char>(c))) c = ' ';
  }
  return std::string(absl::StripAsciiWhitespace(text));
}

std::string ThisProcess() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  gmtime_r(&now, &utc);
  char time[32] = "";
  std::strftime(time, sizeof(time), "%Y-%m-%d %H:%M:%S UTC", &utc);
  const std::string command = ReadFile("/proc/self/cmdline").value_or("");
  return Printable(absl::StrCat("pid ", getpid(), " on ", host, ", since ", time, ": ", command));
}

}  // namespace

FileLock::FileLock(FileLock&& other)
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

FileLock::~FileLock() {
  if (fd_ < 0) return;
  const bool unnamed = ftruncate(fd_, 0) == 0;
  static_cast<void>(unnamed);
  flock(fd_, LOCK_UN);  // close is not enough: a forked child shares the lock
  close(fd_);
}

absl::StatusOr<bool> FileLock::Lock() {
  int error = 0;
  do {
    error = flock(fd_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == EWOULDBLOCK) return false;
  if (error != 0) return CannotLock(path_, error);
  const std::string holder = ThisProcess() + "\n";
  // The name is for the others. On a full disk they may not get it, but the lock holds.
  const bool named = ftruncate(fd_, 0) == 0 && pwrite(fd_, holder.data(), holder.size(), 0) >= 0;
  static_cast<void>(named);
  return true;
}

absl::Status FileLock::CheckStillThere() const { return CheckStillNamed(fd_, path_); }

std::string FileLock::Holder() const {
  std::string text(kMaxHolder, '\0');
  const ssize_t bytes = pread(fd_, text.data(), text.size(), 0);
  text.resize(static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
  text = Printable(std::move(text));
  return text.empty() ? "a process that has not given its name" : text;
}

absl::StatusOr<FileLock> FileLock::TryAcquire(const std::string& path) {
  return Acquire(path, [&](const std::string& holder, double) {
    return absl::UnavailableError(absl::StrCat(path, " is locked by ", holder));
  });
}

absl::StatusOr<FileLock> FileLock::Acquire(const std::string& path, const Waiting& waiting) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPoll = std::chrono::milliseconds(50), kTell = std::chrono::milliseconds(1000);
  // A link is not followed, because the holder's name would overwrite the content of its target.
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
  if (fd < 0) return CannotLock(path, errno);
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::FailedPreconditionError(
        absl::StrCat("cannot lock ", path, ": not a regular file"));
  }
  FileLock lock(fd, path);
  const Clock::time_point begin = Clock::now();
  Clock::time_point next = begin;
  while (true) {
    absl::StatusOr<bool> locked = lock.Lock();
    if (locked.value_or(false)) return lock;
    absl::Status status = locked.status();
    const Clock::time_point now = Clock::now();
    if (status.ok() && now >= next) {
      next = now + kTell;
      status = waiting(lock.Holder(), std::chrono::duration<double>(now - begin).count());
    }
    if (!status.ok()) {
      close(std::exchange(lock.fd_, -1));  // the destructor would remove the holder's name
      return status;
    }
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace burst
