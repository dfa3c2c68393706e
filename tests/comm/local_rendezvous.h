// A rendezvous on this machine, for tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <utility>

#include "absl/status/statusor.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/socket.h"

namespace burst {

inline constexpr char kToken[] = "the token of this test";

// On a port that was free.
inline Socket ListenSomewhere() {
  absl::StatusOr<Socket> listener = Listen("127.0.0.1", 0);
  EXPECT_TRUE(listener.ok()) << listener.status();
  return *std::move(listener);
}

inline RendezvousOptions Options(int rank, int world_size, int port) {
  RendezvousOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.address = "127.0.0.1";
  options.port = port;
  options.num_ports = 1;
  options.job = "test";
  options.token = [] { return kToken; };
  options.timeout = std::chrono::seconds(60);
  return options;
}

}  // namespace burst
