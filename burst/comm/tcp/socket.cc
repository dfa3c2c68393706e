#include "burst/comm/tcp/socket.h"

#include <arpa/inet.h>
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

void SetOption(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

std::string Numeric(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST];
  const int error = getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host,
                                sizeof(host), nullptr, 0, NI_NUMERICHOST);
  if (error != 0) return "";
  const std::string mapped = "::ffff:", text = host;  // IPv4 on a socket that takes both
  return absl::StartsWith(text, mapped) ? text.substr(mapped.size()) : text;
}

absl::StatusOr<Socket> ListenOn(const SocketAddress& address) {
  const auto family = address.storage.ss_family;
  Socket listener(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (listener.fd() < 0) return Errno("socket", errno);
  SetOption(listener.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
  if (family == AF_INET6) SetOption(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
  const auto* const where = reinterpret_cast<const sockaddr*>(&address.storage);
  if (bind(listener.fd(), where, address.length) != 0 || listen(listener.fd(), SOMAXCONN) != 0) {
    if (errno == EADDRINUSE) return absl::AlreadyExistsError("the port is taken");
    if (errno == EADDRNOTAVAIL) return absl::NotFoundError("the address is not this host's");
    return Errno("cannot listen", errno);
  }
  return listener;
}

}  // namespace

absl::Status PollOne(int fd, short events, Deadline deadline) {
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
    BURST_RETURN_IF_ERROR(PollOne(fd_, POLLOUT, deadline));
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
    BURST_RETURN_IF_ERROR(PollOne(fd_, POLLIN, deadline));
  }
  return absl::OkStatus();
}

bool Socket::IsClosed() const {
  pollfd request = {fd_, POLLRDHUP, 0};
  return poll(&request, 1, 0) > 0 && request.revents != 0;
}

absl::StatusOr<Socket> Socket::Accept() const {
  Socket socket(accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.fd() >= 0) {
    SetOption(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
    return socket;
  }
  if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
    return absl::ResourceExhaustedError(absl::StrCat("accept: ", std::strerror(errno)));
  }
  return absl::NotFoundError("no connection");  // or one that was closed already
}

int Socket::port() const {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

std::string Socket::OwnAddress() const {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length);
  return Numeric(address, length);
}

std::string Socket::PeerAddress() const {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &length);
  return Numeric(address, length);
}

absl::Status Socket::ConnectResult() const {
  int code = 0;
  socklen_t length = sizeof(code);
  getsockopt(fd_, SOL_SOCKET, SO_ERROR, &code, &length);
  return code == 0 ? absl::OkStatus() : Errno("cannot connect", code);
}

absl::StatusOr<std::vector<SocketAddress>> Resolve(const std::string& host, int port) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot resolve the host ", host, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    SocketAddress address;
    address.length = one->ai_addrlen;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
    addresses.push_back(address);
  }
  return addresses;
}

SocketAddress WithPort(SocketAddress address, int port) {
  auto* const any = reinterpret_cast<sockaddr*>(&address.storage);
  const uint16_t number = htons(static_cast<uint16_t>(port));
  if (any->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(any)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(any)->sin_port = number;
  }
  return address;
}

bool IsNumericAddress(const std::string& text) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_flags = AI_NUMERICHOST;
  if (getaddrinfo(text.c_str(), nullptr, &hints, &found) != 0) return false;
  freeaddrinfo(found);
  return true;
}

bool IsLoopbackAddress(const std::string& text) {
  if (text == "localhost" || text == "::1") return true;
  return absl::StartsWith(text, "127.") && IsNumericAddress(text);
}

absl::StatusOr<Socket> Listen(const std::string& address, int port) {
  if (!address.empty()) {
    BURST_ASSIGN_OR_RETURN(const auto addresses, Resolve(address, port));
    return ListenOn(addresses.front());
  }
  SocketAddress any;
  auto* const any6 = reinterpret_cast<sockaddr_in6*>(&any.storage);  // takes IPv4 as well
  any6->sin6_family = AF_INET6;
  any6->sin6_addr = in6addr_any;
  any6->sin6_port = htons(static_cast<uint16_t>(port));
  any.length = sizeof(*any6);
  absl::StatusOr<Socket> listener = ListenOn(any);
  if (listener.ok() || absl::IsAlreadyExists(listener.status())) return listener;
  any = SocketAddress();  // a host without IPv6
  auto* const any4 = reinterpret_cast<sockaddr_in*>(&any.storage);
  any4->sin_family = AF_INET;
  any4->sin_port = htons(static_cast<uint16_t>(port));
  any.length = sizeof(*any4);
  return ListenOn(any);
}

absl::StatusOr<Socket> StartConnect(const SocketAddress& address) {
  Socket socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket.fd() < 0) return Errno("socket", errno);
  SetOption(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
  const auto* const where = reinterpret_cast<const sockaddr*>(&address.storage);
  if (connect(socket.fd(), where, address.length) != 0 && errno != EINPROGRESS) {
    return Errno("cannot connect", errno);
  }
  return socket;
}

absl::StatusOr<Socket> Connect(const std::string& host, int port, Deadline deadline) {
  BURST_ASSIGN_OR_RETURN(const auto addresses, Resolve(host, port));
  absl::Status error;
  for (const SocketAddress& address : addresses) {
    absl::StatusOr<Socket> socket = StartConnect(address);
    if (socket.ok()) {
      BURST_RETURN_IF_ERROR(PollOne(socket->fd(), POLLOUT, deadline));
      const absl::Status result = socket->ConnectResult();
      if (result.ok()) return socket;
      error = result;
    } else {
      error = socket.status();
    }
  }
  return error;
}

}  // namespace burst
