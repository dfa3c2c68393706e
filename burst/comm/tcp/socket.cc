#include "burst/comm/tcp/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

absl::Status Errno(const std::string& what, int error) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(error)));
}

absl::Status Poll(int fd, short events, Deadline deadline) {
  while (true) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now()).count();
    if (left <= 0) return absl::DeadlineExceededError("no answer in time");
    pollfd request = {fd, events, 0};
    const int ready = poll(&request, 1, static_cast<int>(std::min<int64_t>(left + 1, 1 << 30)));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return Errno("poll", errno);
  }
}

void SetOption(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

absl::StatusOr<Addresses> Resolve(const std::string& address, int port) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(address.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot resolve the host ", address, ": ", gai_strerror(error)));
  }
  return Addresses(found, freeaddrinfo);
}

std::string Numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  if (getnameinfo(address, length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return host;
}

bool IsLoopback(const std::string& numeric) {
  return absl::StartsWith(numeric, "127.") || absl::StartsWith(numeric, "::ffff:127.") ||
         numeric == "::1";
}

Socket NewSocket(int family) {
  return Socket(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

absl::StatusOr<Socket> ListenOn(const sockaddr* address, socklen_t length) {
  Socket listener = NewSocket(address->sa_family);
  if (listener.fd() < 0) return Errno("socket", errno);
  SetOption(listener.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (address->sa_family == AF_INET6) SetOption(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(listener.fd(), address, length) != 0 || listen(listener.fd(), SOMAXCONN) != 0) {
    if (errno == EADDRINUSE) return absl::AlreadyExistsError("the port is taken");
    return Errno("cannot listen", errno);
  }
  return listener;
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

void Socket::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

absl::Status Socket::Write(const void* data, size_t bytes, Deadline deadline) const {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = send(fd_, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (n > 0) done += n;
    if (n >= 0 || errno == EINTR) continue;
    if (errno != EAGAIN) return Errno("the connection was closed", errno);
    BURST_RETURN_IF_ERROR(Poll(fd_, POLLOUT, deadline));
  }
  return absl::OkStatus();
}

absl::Status Socket::Read(void* data, size_t bytes, Deadline deadline) const {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = recv(fd_, static_cast<char*>(data) + done, bytes - done, 0);
    if (n > 0) done += n;
    if (n == 0) return absl::UnavailableError("the connection was closed");
    if (n > 0 || errno == EINTR) continue;
    if (errno != EAGAIN) return Errno("the connection was closed", errno);
    BURST_RETURN_IF_ERROR(Poll(fd_, POLLIN, deadline));
  }
  return absl::OkStatus();
}

bool Socket::IsClosed() const {
  char byte;
  const ssize_t n = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

absl::StatusOr<Socket> Socket::Accept(Deadline deadline) const {
  while (true) {
    Socket socket(accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.fd() >= 0) {
      SetOption(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
      return socket;
    }
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) return Errno("accept", errno);
    BURST_RETURN_IF_ERROR(Poll(fd_, POLLIN, deadline));
  }
}

int Socket::port() const {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

std::string Socket::PeerAddress() const {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &length);
  std::string numeric = Numeric(reinterpret_cast<sockaddr*>(&address), length);
  return IsLoopback(numeric) ? "" : numeric;
}

absl::StatusOr<Socket> Listen(const std::string& address, int port) {
  BURST_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(address, port));
  if (IsLoopback(Numeric(addresses->ai_addr, addresses->ai_addrlen))) {
    return ListenOn(addresses->ai_addr, addresses->ai_addrlen);
  }
  sockaddr_in6 any6 = {};  // takes IPv4 as well
  any6.sin6_family = AF_INET6;
  any6.sin6_addr = in6addr_any;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  absl::StatusOr<Socket> listener = ListenOn(reinterpret_cast<sockaddr*>(&any6), sizeof(any6));
  if (listener.ok() || absl::IsAlreadyExists(listener.status())) return listener;
  sockaddr_in any = {};  // a host without IPv6
  any.sin_family = AF_INET;
  any.sin_port = any6.sin6_port;
  return ListenOn(reinterpret_cast<sockaddr*>(&any), sizeof(any));
}

absl::StatusOr<Socket> Connect(const std::string& address, int port, Deadline deadline) {
  BURST_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(address, port));
  absl::Status error;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next) {
    Socket socket = NewSocket(one->ai_family);
    if (socket.fd() < 0) continue;
    int code = connect(socket.fd(), one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
    if (code == EINPROGRESS) {
      BURST_RETURN_IF_ERROR(Poll(socket.fd(), POLLOUT, deadline));
      socklen_t length = sizeof(code);
      getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &code, &length);
    }
    if (code == 0) {
      SetOption(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
      return socket;
    }
    error = Errno("cannot connect", code);
  }
  return error.ok() ? absl::UnavailableError("no address to connect to") : error;
}

}  // namespace burst
