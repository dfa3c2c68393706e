// TCP sockets, non-blocking, with deadlines. The lowest file of this folder: rendezvous makes the
// connections of a job from it, tcp_communicator sends messages over them.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace burst {

using Deadline = std::chrono::steady_clock::time_point;

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}  // takes ownership
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket() { Close(); }

  int fd() const { return fd_; }  // -1: none
  void Close();

  // Writes or reads all bytes; else DeadlineExceeded, or Unavailable if the connection was closed.
  absl::Status Write(const void* data, size_t bytes, Deadline deadline) const;
  absl::Status Read(void* data, size_t bytes, Deadline deadline) const;

  bool IsClosed() const;  // by the other end

  // For a listening socket. port(): the one it listens on.
  absl::StatusOr<Socket> Accept(Deadline deadline) const;
  int port() const;
  // The other end's numeric address; empty if it is this host's loopback.
  std::string PeerAddress() const;

 private:
  int fd_ = -1;
};

// Listens for connections to `address`, which is one of this host: on the loopback interface if the
// address is loopback, else on all interfaces. Port 0: any free one. AlreadyExists if the port is
// taken.
absl::StatusOr<Socket> Listen(const std::string& address, int port);
absl::StatusOr<Socket> Connect(const std::string& address, int port, Deadline deadline);

}  // namespace burst
