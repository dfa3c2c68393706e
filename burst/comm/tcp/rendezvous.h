// Connects all processes of a job. Rank 0 listens. The others connect to it and receive the
// addresses of all ranks. Then every two ranks connect. Both ends of every connection prove that
// they know the job's token (greeting.h). A connection without a proof is a stranger's: it is
// polled together with the others, has a deadline of its own, and is counted. Afterwards no socket
// listens.
//
// What a rank listens on:
//   a job of one host                                  a Unix socket (socket_folder.h), without a
//                                                      token too; loopback if there is no folder
//   of several hosts, `address` is a number of its     the interface of that address
//   of several hosts, else                             all interfaces: the name may mean another
//                                                      address to other hosts, and on its own host
//                                                      be 127.0.1.1
//   ranks that reach rank 0 from another host          the interface by which they reach it
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/comm/tcp/link.h"
#include "burst/comm/tcp/socket_folder.h"

namespace burst {

struct RendezvousOptions {
  int rank = 0;
  int world_size = 1;
  // The ranks of one host meet here; none: by TCP.
  std::optional<SocketFolder> folder;
  bool several_hosts = false;
  std::string address;  // rank 0's host: a name or a number
  // Rank 0 listens on the first free one of `num_ports` ports from here on. The others try all of
  // them until rank 0 answers. In a folder a port is a part of the job's name.
  int port = 0;
  int num_ports = 16;
  std::string job;    // tells apart jobs with the same token and port
  std::string token;  // the job's secret; empty with a folder, which is one itself
  std::chrono::milliseconds timeout = std::chrono::minutes(3);
  // For a greeting, from the first byte to the proof.
  std::chrono::milliseconds greeting_timeout = std::chrono::seconds(10);
};

struct Connections {
  std::vector<PeerLink> links;  // in order of rank; this rank's own entry is empty
  int strangers = 0;            // connections to this rank that proved nothing
  int doubles = 0;              // connections that proved to be a rank that has one already
};

// Listens where the ranks of one host look for rank 0. For callers that must listen before they
// know their rank. AlreadyExists while a job of the same name, port and token meets.
absl::StatusOr<Listener> ListenInFolder(const RendezvousOptions& options);

// Rank 0 listens on `listener` if one is given. Unavailable after the timeout, with the ranks that
// did not come; InvalidArgument if the processes disagree about their number.
absl::StatusOr<Connections> Rendezvous(const RendezvousOptions& options,
                                       Listener listener = Listener());

}  // namespace burst
