// Makes a rendezvous on this machine, for tests.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/socket.h"
#include "burst/comm/tcp/socket_folder.h"

namespace burst {

inline constexpr char kToken[] = "the token of this test";

// Listens on a free port.
inline Socket ListenSomewhere() {
  absl::StatusOr<Socket> listener = Listen("127.0.0.1", 0);
  EXPECT_TRUE(listener.ok()) << listener.status();
  return *std::move(listener);
}

// Returns a folder for sockets of one test case, which FreshTestFolder has made.
inline SocketFolder FolderAt(const std::string& path) {
  EXPECT_EQ(chmod(path.c_str(), 0700), 0);
  absl::StatusOr<SocketFolder> folder = SocketFolder::Open(path);
  EXPECT_TRUE(folder.ok()) << folder.status();
  return *std::move(folder);
}

inline RendezvousOptions Options(int rank, int world_size, int port) {
  RendezvousOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.address = "127.0.0.1";
  options.port = port;
  options.num_ports = 1;
  options.job = "test";
  options.token = kToken;
  options.timeout = std::chrono::seconds(60);
  return options;
}

}  // namespace burst
