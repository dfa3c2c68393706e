// Makes ranks that are threads of a test meet at a rendezvous.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "burst/comm/tcp/rendezvous.h"
#include "tests/comm/local_rendezvous.h"

namespace burst {

struct Outcome {
  std::vector<absl::Status> statuses;
  std::vector<int> strangers, doubles;
};

// Makes a rendezvous of all ranks, as threads. `strange` runs on the port before the others come.
inline Outcome Meet(
    const std::vector<RendezvousOptions>& ranks, Listener listener = Listener(),
    const std::function<void()>& strange = [] {}) {
  Outcome outcome;
  outcome.statuses.resize(ranks.size());
  outcome.strangers.resize(ranks.size());
  outcome.doubles.resize(ranks.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (rank == 1) strange();
    threads.emplace_back([&, rank] {
      const auto met = Rendezvous(ranks[rank], rank == 0 ? std::move(listener) : Listener());
      outcome.statuses[rank] = met.status();
      if (!met.ok()) return;
      outcome.strangers[rank] = met->strangers;
      outcome.doubles[rank] = met->doubles;
      for (size_t peer = 0; peer < ranks.size(); ++peer) {
        EXPECT_EQ(met->links[peer].socket.fd() < 0, peer == rank);
        EXPECT_EQ(met->links[peer].seal.has_value(), peer != rank && !ranks[rank].folder);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcome;
}

inline std::vector<RendezvousOptions> AllOptions(int world_size, int port) {
  std::vector<RendezvousOptions> all;
  for (int rank = 0; rank < world_size; ++rank) all.push_back(Options(rank, world_size, port));
  return all;
}

inline void ExpectOk(const Outcome& outcome) {
  EXPECT_EQ(outcome.statuses, std::vector<absl::Status>(outcome.statuses.size()));
}

}  // namespace burst
