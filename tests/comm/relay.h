// A relay between two ranks: from a port that one rank calls to the port on which the other
// listens. Tests see and change the bytes that pass.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "burst/comm/tcp/socket.h"

namespace burst {

class Relay {
 public:
  // Changes `bytes` before the relay hands them on. `from_caller` tells their direction, `before`
  // is the number of bytes handed on before in that direction.
  using Change = std::function<void(bool from_caller, int64_t before, std::string* bytes)>;

  // Accepts one call on `listener`, and calls host:port for it.
  Relay(Socket listener, std::string host, int port, Change change = nullptr)
      : listener_(std::move(listener)),
        host_(std::move(host)),
        port_(port),
        change_(std::move(change)),
        thread_([this] { Run(); }) {}
  ~Relay() {
    ends_ = true;
    thread_.join();
  }

  // Returns the bytes that the caller has sent.
  std::string recorded() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }

 private:
  static Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(20); }

  void Run() {
    while (!ends_) {
      if (!PollOne(listener_.fd(), POLLIN, Deadline::clock::now() + std::chrono::milliseconds(20))
               .ok()) {
        continue;
      }
      absl::StatusOr<Socket> caller = listener_.Accept();
      absl::StatusOr<Socket> called = Connect(host_, port_, Soon());
      if (caller.ok() && called.ok()) Between(*caller, *called);
    }
  }

  void Between(const Socket& caller, const Socket& called) {
    int64_t passed[2] = {};
    while (!ends_) {
      pollfd both[] = {{caller.fd(), POLLIN, 0}, {called.fd(), POLLIN, 0}};
      poll(both, 2, 20);
      for (int i = 0; i < 2; ++i) {
        if (both[i].revents == 0) continue;
        std::string bytes(1 << 16, '\0');
        const ssize_t n = recv(both[i].fd, &bytes[0], bytes.size(), 0);
        if (n <= 0) return;
        bytes.resize(n);
        if (i == 0) {
          std::lock_guard<std::mutex> lock(mutex_);
          recorded_ += bytes;
        }
        if (change_) change_(i == 0, passed[i], &bytes);
        passed[i] += n;
        if (!(i == 0 ? called : caller).Write(bytes.data(), bytes.size(), Soon()).ok()) return;
      }
    }
  }

  const Socket listener_;
  const std::string host_;
  const int port_;
  const Change change_;
  std::mutex mutex_;
  std::string recorded_;
  std::atomic<bool> ends_{false};
  std::thread thread_;  // last: it uses the others
};

}  // namespace burst
