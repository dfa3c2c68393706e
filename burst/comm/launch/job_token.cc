#include "burst/comm/launch/job_token.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/tcp/socket.h"

namespace burst {
namespace {

constexpr size_t kLeastCharacters = 16, kMostCharacters = 4096;
// One of 10,000 tokens of 16 random hexadecimal digits has fewer different digits.
constexpr size_t kLeastDifferent = 6;

using Variable = std::function<const char*(const char*)>;

std::string Text(const Variable& variable, const char* name) {
  const char* text = variable(name);
  return text == nullptr ? "" : text;
}

// Returns whether only this user (and root) can read or change the open file.
bool IsPrivateFile(int fd) {
  struct stat about;
  return fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() &&
         (about.st_mode & 077) == 0;
}

std::string ReadToken(int fd) {
  std::string text(kMostCharacters + 1, '\0');
  const ssize_t n = read(fd, &text[0], text.size());
  text.resize(n > 0 ? n : 0);
  absl::StripTrailingAsciiWhitespace(&text);
  return text;
}

absl::Status CheckToken(const std::string& name, const std::string& token) {
  const char* const advice = " (openssl rand -hex 16 makes one)";
  if (token.size() < kLeastCharacters || token.size() > kMostCharacters) {
    return absl::InvalidArgumentError(absl::StrCat(name, " holds ", token.size(),
                                                   " characters: a token has ", kLeastCharacters,
                                                   " to ", kMostCharacters, advice));
  }
  const size_t different = std::set<char>(token.begin(), token.end()).size();
  if (different >= kLeastDifferent) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is easy to guess: a token has ", kLeastDifferent,
                   " different characters or more, not ", different, advice));
}

absl::StatusOr<std::string> TokenOfFile(const std::string& path) {
  const Socket file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("BURST_TOKEN_FILE=", path, ": ", std::strerror(errno)));
  }
  if (!IsPrivateFile(file.fd())) {
    return absl::InvalidArgumentError(
        absl::StrCat("BURST_TOKEN_FILE=", path,
                     " must be this user's own file that no other may read (chmod 600)"));
  }
  const std::string token = ReadToken(file.fd());
  BURST_RETURN_IF_ERROR(CheckToken("BURST_TOKEN_FILE", token));
  return token;
}

}  // namespace

absl::StatusOr<std::string> FindJobToken(const ProcessLaunch& launch, const Variable& variable) {
  const std::string token = Text(variable, "BURST_TOKEN");
  if (!token.empty()) {
    BURST_RETURN_IF_ERROR(CheckToken("BURST_TOKEN", token));
    return token;
  }
  const std::string path = Text(variable, "BURST_TOKEN_FILE");
  if (!path.empty()) return TokenOfFile(path);
  if (!launch.several_hosts) return std::string();
  return absl::InvalidArgumentError(absl::StrCat(
      "BURST_TOKEN is not set: the ", launch.world_size, " processes of ", launch.launcher,
      " run on several hosts and know each other by a secret of 16 characters or more, in "
      "BURST_TOKEN or in a file of mode 600 that BURST_TOKEN_FILE names"));
}

}  // namespace burst
