#include "burst/comm/tcp/socket_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {
namespace {

absl::Status NotSafe(const std::string& path, const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat(path, ", where the sockets of this job would be, ", why,
                   "; remove it, or set XDG_RUNTIME_DIR to a folder of mode 700, or BURST_TOKEN"));
}

int OpenFolder(const std::string& path, int flags) {
  return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
}

// Returns whether only this user (and root) can read or change the open folder.
bool IsPrivate(int fd) {
  struct stat about;
  return fstat(fd, &about) == 0 && about.st_uid == geteuid() && (about.st_mode & 077) == 0;
}

std::string NameOf(const std::string& name, int port) { return absl::StrCat(name, ".", port); }

// Returns an owner of a file. The file is removed with its last owner.
std::shared_ptr<const void> RemovedAtEnd(std::shared_ptr<const Socket> folder, std::string file,
                                         std::shared_ptr<const Socket> held = nullptr) {
  return {nullptr, [folder = std::move(folder), file = std::move(file), held = std::move(held)](
                       const void*) { unlinkat(folder->fd(), file.c_str(), 0); }};
}

// Returns the address of a socket in the open folder. The folder's own path may be too long for an
// address.
sockaddr_un AddressIn(int folder, const std::string& file) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = absl::StrCat("/proc/self/fd/", folder, "/", file);
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return address;
}

absl::StatusOr<Socket> NewSocket() {
  Socket made(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (made.fd() >= 0) return made;
  return absl::UnavailableError(absl::StrCat("socket: ", std::strerror(errno)));
}

}  // namespace

Listener::Listener(Socket socket) : socket_(std::move(socket)) {
  if (listens()) port_ = socket_.port();
}

std::string SocketFolder::Default(const std::function<const char*(const char*)>& variable) {
  const char* const runtime = variable("XDG_RUNTIME_DIR");
  if (runtime != nullptr && *runtime != '\0') {
    const Socket folder(OpenFolder(runtime, 0));
    if (folder.fd() >= 0 && IsPrivate(folder.fd())) return runtime;
  }
  return absl::StrCat("/tmp/burst-", geteuid());
}

absl::StatusOr<SocketFolder> SocketFolder::Open(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return NotSafe(path, absl::StrCat("cannot be made: ", std::strerror(errno)));
  }
  auto folder = std::make_shared<const Socket>(OpenFolder(path, O_NOFOLLOW));
  if (folder->fd() < 0 || !IsPrivate(folder->fd())) {
    return NotSafe(path, "is not a folder that is this user's alone");
  }
  return SocketFolder(path, std::move(folder));
}

// Locks the file that has the name now, not one that its last holder has just removed.
absl::StatusOr<std::shared_ptr<const void>> SocketFolder::Lock(const std::string& file) const {
  while (true) {
    auto held = std::make_shared<const Socket>(
        openat(folder_->fd(), file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (held->fd() < 0) {
      return NotSafe(path_, absl::StrCat("cannot be written: ", std::strerror(errno)));
    }
    if (flock(held->fd(), LOCK_EX | LOCK_NB) != 0) {
      return absl::AlreadyExistsError(absl::StrCat(path_, "/", file, " is held"));
    }
    struct stat ours, named;
    if (fstat(held->fd(), &ours) == 0 &&
        fstatat(folder_->fd(), file.c_str(), &named, AT_SYMLINK_NOFOLLOW) == 0 &&
        ours.st_ino == named.st_ino) {
      return RemovedAtEnd(folder_, file, std::move(held));
    }
  }
}

absl::StatusOr<Listener> SocketFolder::ListenAt(const std::string& name, int port) const {
  const std::string file = NameOf(name, port);
  BURST_ASSIGN_OR_RETURN(Socket made, NewSocket());
  const sockaddr_un address = AddressIn(folder_->fd(), file);
  if (bind(made.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno == EADDRINUSE) return absl::AlreadyExistsError("the name is taken");
    return NotSafe(path_, absl::StrCat("cannot be written: ", std::strerror(errno)));
  }
  Listener listener;
  listener.name_ = RemovedAtEnd(folder_, file);
  if (listen(made.fd(), SOMAXCONN) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen: ", std::strerror(errno)));
  }
  listener.socket_ = std::move(made);
  listener.port_ = port;
  return listener;
}

absl::StatusOr<Listener> SocketFolder::ListenAsFirst(const std::string& name) const {
  BURST_ASSIGN_OR_RETURN(auto lock, Lock(name + ".lock"));
  unlinkat(folder_->fd(), NameOf(name, 0).c_str(), 0);
  BURST_ASSIGN_OR_RETURN(Listener listener, ListenAt(name, 0));
  listener.lock_ = std::move(lock);
  return listener;
}

absl::StatusOr<Listener> SocketFolder::Listen(const std::string& name) const {
  while (true) {
    uint16_t port = 0;
    if (getrandom(&port, sizeof(port), 0) != sizeof(port)) {
      return absl::UnavailableError("the system has no random numbers");
    }
    if (port == 0) continue;
    absl::StatusOr<Listener> listener = ListenAt(name, port);
    if (!absl::IsAlreadyExists(listener.status())) return listener;
  }
}

absl::StatusOr<Socket> SocketFolder::Connect(const std::string& name, int port) const {
  const std::string file = NameOf(name, port);
  BURST_ASSIGN_OR_RETURN(Socket made, NewSocket());
  const sockaddr_un address = AddressIn(folder_->fd(), file);
  if (connect(made.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(absl::StrCat(path_, "/", file, ": ", std::strerror(errno)));
  }
  if (IsOwnUser(made)) return made;
  return absl::UnavailableError(absl::StrCat(path_, "/", file, " is another user's"));
}

bool SocketFolder::IsOwnUser(const Socket& socket) {
  ucred other = {};
  socklen_t length = sizeof(other);
  return getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &other, &length) == 0 &&
         other.uid == geteuid();
}

}  // namespace burst
