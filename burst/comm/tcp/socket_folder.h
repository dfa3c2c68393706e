// Unix sockets, by which the ranks of one host talk. There is no port that another user could take
// or call.
//
// They lie in a folder of mode 700 of this user, and both ends check that the other process is this
// user's (SO_PEERCRED). Such a process could read this process's memory anyway.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/tcp/socket.h"

namespace burst {

// A socket that listens, on TCP or in a folder; its name in a folder goes with it.
class Listener {
 public:
  Listener() = default;
  Listener(Socket socket);  // NOLINT(google-explicit-constructor): a TCP socket is one
  Listener(Listener&& other) noexcept = default;
  Listener& operator=(Listener&& other) noexcept = default;

  bool listens() const { return socket_.fd() >= 0; }
  const Socket& socket() const { return socket_; }
  // What the proofs of a greeting name: the TCP port, or the number in the socket's name.
  int port() const { return port_; }

 private:
  friend class SocketFolder;
  Socket socket_;
  int port_ = 0;
  std::shared_ptr<const void> lock_, name_;  // their deleters remove the files, the name first
};

class SocketFolder {
 public:
  // The folder of this user on this host: $XDG_RUNTIME_DIR where that is a private folder, else
  // /tmp/burst-<user id>. `variable` is getenv, or replaces it in tests.
  static std::string Default(const std::function<const char*(const char*)>& variable);

  // Makes the folder if there is none. FailedPrecondition unless it is this user's alone.
  static absl::StatusOr<SocketFolder> Open(const std::string& path);
  const std::string& path() const { return path_; }

  // Listens as number 0 of the job `name`. AlreadyExists while another process does; what a process
  // left that was killed is replaced.
  absl::StatusOr<Listener> ListenAsFirst(const std::string& name) const;
  // Listens at a number from 1 to 65535 that nobody has.
  absl::StatusOr<Listener> Listen(const std::string& name) const;
  // Unavailable if nobody listens there, or another user does.
  absl::StatusOr<Socket> Connect(const std::string& name, int port) const;
  // Whether the process at the other end is this user's.
  static bool IsOwnUser(const Socket& socket);

 private:
  SocketFolder(std::string path, std::shared_ptr<const Socket> folder)
      : path_(std::move(path)), folder_(std::move(folder)) {}
  absl::StatusOr<Listener> ListenAt(const std::string& name, int port) const;
  absl::StatusOr<std::shared_ptr<const void>> Lock(const std::string& file) const;

  std::string path_;
  std::shared_ptr<const Socket> folder_;  // the open folder
};

}  // namespace burst
