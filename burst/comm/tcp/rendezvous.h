// How processes find each other: rank 0 listens, the others call it and learn where all are; then
// every two of them have a connection.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/comm/tcp/socket.h"

namespace burst {

struct RendezvousOptions {
  int rank = 0;
  int world_size = 1;
  std::string address;  // of rank 0's host
  // Rank 0 listens on the first of `num_ports` ports from here on that is free. The others try all
  // of them until it answers, and know it by `job`.
  int port = 0;
  int num_ports = 16;
  std::string job;
  std::chrono::milliseconds timeout = std::chrono::minutes(3);
};

// The connection with every rank, in order of rank; the own one is empty. Unavailable, saying who
// did not come, after the timeout. Rank 0 listens on `listener` if that is given.
absl::StatusOr<std::vector<Socket>> Rendezvous(const RendezvousOptions& options,
                                               Socket listener = Socket());

}  // namespace burst
