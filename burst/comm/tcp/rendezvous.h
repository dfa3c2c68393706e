// How processes find each other: rank 0 listens; the others connect to it and receive the addresses
// of all ranks; then every two ranks connect.
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
  // Rank 0 listens on the first free one of `num_ports` ports from here on. The others try all of
  // them until rank 0 answers, which they know by `job`.
  int port = 0;
  int num_ports = 16;
  std::string job;
  std::chrono::milliseconds timeout = std::chrono::minutes(3);
};

// The connection with every rank, in order of rank; this rank's own entry is empty. Rank 0 listens
// on `listener` if one is given. Unavailable after the timeout, with the ranks that did not come;
// InvalidArgument if the processes disagree about their number or ranks.
absl::StatusOr<std::vector<Socket>> Rendezvous(const RendezvousOptions& options,
                                               Socket listener = Socket());

}  // namespace burst
