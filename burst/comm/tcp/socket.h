// TCP sockets, non-blocking, with deadlines. The lowest file of this folder: rendezvous makes the
// connections of a job from it, peer_connections sends messages over them.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

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

  // For a listening socket. Accept returns the next connection, NotFound if there is none,
  // ResourceExhausted if the process cannot open more files. The socket listens on port().
  absl::StatusOr<Socket> Accept() const;
  int port() const;
  // Numeric addresses of both ends.
  std::string OwnAddress() const;
  std::string PeerAddress() const;
  // Returns the result of StartConnect. Call it once the connection can be written.
  absl::Status ConnectResult() const;

 private:
  int fd_ = -1;
};

// An address to connect to or listen on.
struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
};

// Returns all addresses of a host's name, or of its numeric form. Unavailable if there is none.
// Looking up a name may take seconds.
absl::StatusOr<std::vector<SocketAddress>> Resolve(const std::string& host, int port);
SocketAddress WithPort(SocketAddress address, int port);
// Whether the text is a numeric address; a name is not.
bool IsNumericAddress(const std::string& text);
// Returns whether the text means the host itself: "localhost", 127.0.0.0/8 or ::1.
bool IsLoopbackAddress(const std::string& text);

// Listens on one numeric address of this host; empty: on all interfaces. Port 0: any free one.
// AlreadyExists if the port is taken, NotFound if the address is not this host's.
absl::StatusOr<Socket> Listen(const std::string& address, int port);

// Starts a connection. The socket becomes writable when the connection is made, or has failed.
absl::StatusOr<Socket> StartConnect(const SocketAddress& address);
// Connects, and waits for it. Tries all addresses of the host.
absl::StatusOr<Socket> Connect(const std::string& host, int port, Deadline deadline);

// Waits for one of `events` (POLLIN, POLLOUT); DeadlineExceeded if none comes.
absl::Status PollOne(int fd, short events, Deadline deadline);

}  // namespace burst
