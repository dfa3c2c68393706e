#include "burst/comm/launch/job_token.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr size_t kLeastCharacters = 16, kMostCharacters = 4096;

using Variable = std::function<const char*(const char*)>;

std::string Text(const Variable& variable, const char* name) {
  const char* text = variable(name);
  return text == nullptr ? "" : text;
}

// A file descriptor that closes itself.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// Whether nobody but this user (and root) can read or change what is open.
bool IsPrivate(int fd, mode_t type) {
  struct stat about;
  return fstat(fd, &about) == 0 && (about.st_mode & S_IFMT) == type && about.st_uid == geteuid() &&
         (about.st_mode & 077) == 0;
}

std::string ReadToken(int fd) {
  std::string text(kMostCharacters + 1, '\0');
  const ssize_t n = read(fd, &text[0], text.size());
  text.resize(n > 0 ? n : 0);
  absl::StripTrailingAsciiWhitespace(&text);
  return text;
}

absl::Status CheckLength(const std::string& name, const std::string& token) {
  if (token.size() >= kLeastCharacters && token.size() <= kMostCharacters) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " holds ", token.size(), " characters: a token has ", kLeastCharacters,
                   " to ", kMostCharacters, " (openssl rand -hex 16 makes one)"));
}

absl::StatusOr<std::string> TokenOfFile(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("BURST_TOKEN_FILE=", path, ": ", std::strerror(errno)));
  }
  if (!IsPrivate(file.fd(), S_IFREG)) {
    return absl::InvalidArgumentError(
        absl::StrCat("BURST_TOKEN_FILE=", path,
                     " must be this user's own file that no other may read (chmod 600)"));
  }
  const std::string token = ReadToken(file.fd());
  BURST_RETURN_IF_ERROR(CheckLength("BURST_TOKEN_FILE", token));
  return token;
}

// The folder for tokens of this user's jobs on this host.
std::string FolderName(const Variable& variable) {
  const std::string runtime = Text(variable, "XDG_RUNTIME_DIR");
  if (!runtime.empty()) {
    const File folder(open(runtime.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.fd() >= 0 && IsPrivate(folder.fd(), S_IFDIR)) return runtime;
  }
  return absl::StrCat("/tmp/burst-", geteuid());
}

int OpenFolder(const std::string& folder) {
  return open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

absl::Status NotSafe(const std::string& folder, const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat(folder, ", where this job's token would be, ", why,
                   "; set BURST_TOKEN or BURST_TOKEN_FILE instead"));
}

// A token of 32 random bytes in a new file that takes the name at once; returns its number.
absl::StatusOr<ino_t> MakeFile(const std::string& folder, const std::string& name) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return NotSafe(folder, absl::StrCat("cannot be made: ", std::strerror(errno)));
  }
  const File in(OpenFolder(folder));
  if (in.fd() < 0 || !IsPrivate(in.fd(), S_IFDIR)) {
    return NotSafe(folder, "is not a folder that is this user's alone");
  }
  char random[32];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) {
    return NotSafe(folder, "needs random numbers, of which the system has none");
  }
  const std::string token = absl::BytesToHexString(absl::string_view(random, sizeof(random)));
  const std::string temporary = absl::StrCat(name, ".", getpid());
  unlinkat(in.fd(), temporary.c_str(), 0);
  const File file(openat(in.fd(), temporary.c_str(),
                         O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  const auto size = static_cast<ssize_t>(token.size());
  if (file.fd() < 0 || write(file.fd(), token.data(), token.size()) != size ||
      renameat(in.fd(), temporary.c_str(), in.fd(), name.c_str()) != 0) {
    const int error = errno;
    unlinkat(in.fd(), temporary.c_str(), 0);
    return NotSafe(folder, absl::StrCat("cannot be written: ", std::strerror(error)));
  }
  struct stat about;
  return fstat(file.fd(), &about) == 0 ? about.st_ino : 0;
}

}  // namespace

absl::Status JobToken::Check(const ProcessLaunch& launch, const Variable& variable) {
  const std::string token = Text(variable, "BURST_TOKEN");
  if (!token.empty()) return CheckLength("BURST_TOKEN", token);
  const std::string path = Text(variable, "BURST_TOKEN_FILE");
  if (!path.empty()) return TokenOfFile(path).status();
  if (!launch.several_hosts) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "BURST_TOKEN is not set: the ", launch.world_size, " processes of ", launch.launcher,
      " run on several hosts and know each other by a secret of 16 characters or more, in "
      "BURST_TOKEN or in a file of mode 600 that BURST_TOKEN_FILE names"));
}

absl::StatusOr<JobToken> JobToken::Find(const ProcessLaunch& launch, const Variable& variable) {
  BURST_RETURN_IF_ERROR(Check(launch, variable));
  JobToken found;
  found.token_ = Text(variable, "BURST_TOKEN");
  if (!found.token_.empty()) return found;
  const std::string path = Text(variable, "BURST_TOKEN_FILE");
  if (!path.empty()) {
    BURST_ASSIGN_OR_RETURN(found.token_, TokenOfFile(path));
    return found;
  }
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (unsigned char c : absl::StrCat(launch.job, " ", launch.port)) {
    hash = (hash ^ c) * 0x100000001b3;
  }
  found.folder_ = FolderName(variable);
  found.name_ = absl::StrFormat("burst-token-%016x", hash);
  if (launch.rank == 0) {
    BURST_ASSIGN_OR_RETURN(found.made_, MakeFile(found.folder_, found.name_));
  }
  return found;
}

JobToken::JobToken(JobToken&& other) noexcept
    : token_(std::move(other.token_)),
      folder_(std::move(other.folder_)),
      name_(std::move(other.name_)),
      made_(std::exchange(other.made_, 0)) {}

JobToken::~JobToken() {
  if (made_ == 0) return;
  const std::string path = absl::StrCat(folder_, "/", name_);
  struct stat about;
  if (lstat(path.c_str(), &about) == 0 && about.st_ino == made_) unlink(path.c_str());
}

absl::StatusOr<std::string> JobToken::Read() const {
  if (!token_.empty()) return token_;
  const auto missing = [this] {
    return absl::NotFoundError(absl::StrCat("rank 0 has left no token in ", folder_, "/", name_));
  };
  const File in(OpenFolder(folder_));
  if (in.fd() < 0) return missing();
  if (!IsPrivate(in.fd(), S_IFDIR)) {
    return NotSafe(folder_, "is not a folder that is this user's alone");
  }
  const File file(openat(in.fd(), name_.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (file.fd() < 0 || !IsPrivate(file.fd(), S_IFREG)) return missing();
  const std::string token = ReadToken(file.fd());
  return token.size() < kLeastCharacters ? missing() : absl::StatusOr<std::string>(token);
}

}  // namespace burst
