// Tests a resolver that takes a second for a name, as a wrong server of AAAA records does. Ranks
// meet, and ask it once.
#include <gtest/gtest.h>
#include <netdb.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/socket.h"
#include "tests/comm/local_rendezvous.h"

namespace {

constexpr char kName[] = "localhost";
std::atomic<int> lookups{0};
std::atomic<int> lookup_ms{0};

}  // namespace

extern "C" int __real_getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                                  addrinfo** result);
extern "C" int __wrap_getaddrinfo(const char* node, const char* service, const addrinfo* hints,
                                  addrinfo** result) {
  const bool numeric = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (node != nullptr && node == std::string(kName) && !numeric) {
    ++lookups;
    std::this_thread::sleep_for(std::chrono::milliseconds(lookup_ms.load()));
  }
  return __real_getaddrinfo(node, service, hints, result);
}

namespace burst {
namespace {

TEST(SlowResolver, RanksMeetAndAskOnce) {
  lookup_ms = 1000;
  // Rank 0's port is the last one that ranks try. A look-up for each would take 16 s.
  const int last = ListenSomewhere().port();
  std::vector<RendezvousOptions> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    RendezvousOptions options = Options(rank, 2, last - 15);
    options.several_hosts = true;
    options.address = kName;
    options.num_ports = 16;
    options.greeting_timeout = std::chrono::seconds(5);
    ranks.push_back(options);
  }
  ranks[0].port = last;
  ranks[0].num_ports = 1;
  absl::Status statuses[2];
  std::thread rank0([&] { statuses[0] = Rendezvous(ranks[0]).status(); });
  statuses[1] = Rendezvous(ranks[1]).status();
  rank0.join();
  EXPECT_EQ(statuses[0], absl::OkStatus());
  EXPECT_EQ(statuses[1], absl::OkStatus());
  EXPECT_EQ(lookups, 1);
}

}  // namespace
}  // namespace burst
