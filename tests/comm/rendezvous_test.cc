// Tests how processes find each other, and that strangers cannot disturb them.
#include "burst/comm/tcp/rendezvous.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/comm/tcp/greeting.h"
#include "burst/comm/tcp/socket.h"
#include "tests/comm/local_rendezvous.h"
#include "tests/comm/meeting.h"
#include "tests/comm/relay.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

Deadline In(milliseconds time) { return steady_clock::now() + time; }

Socket Call(int port) {
  absl::StatusOr<Socket> socket = Connect("127.0.0.1", port, In(seconds(5)));
  EXPECT_TRUE(socket.ok()) << socket.status();
  return *std::move(socket);
}

// Returns whether the other end closes the connection within some seconds.
bool IsHungUp(const Socket& socket) {
  char byte;
  while (true) {
    const absl::Status status = socket.Read(&byte, 1, In(seconds(20)));
    if (!status.ok()) return !absl::IsDeadlineExceeded(status);
  }
}

TEST(Rendezvous, EveryTwoRanksConnect) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  const Outcome outcome = Meet(AllOptions(5, port), std::move(listener));
  ExpectOk(outcome);
  EXPECT_EQ(outcome.strangers, std::vector<int>(5));
}

TEST(Rendezvous, SaysWhoDidNotCome) {
  RendezvousOptions options = Options(0, 3, 0);
  options.timeout = milliseconds(300);
  EXPECT_EQ(Rendezvous(options, ListenSomewhere()).status(),
            absl::UnavailableError("rank 0 waited 0.3 s in vain for rank 1, 2 of 3"));
  const int nobody = ListenSomewhere().port();
  options = Options(2, 3, nobody);
  options.timeout = milliseconds(300);
  EXPECT_EQ(Rendezvous(options).status(),
            absl::UnavailableError(
                absl::StrCat("rank 2 of 3 found no rank 0 at 127.0.0.1:", nobody,
                             " in 0.3 s; MASTER_ADDR and MASTER_PORT say where it listens")));
}

TEST(Rendezvous, TheSizeOfTheWorldMustAgree) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  const auto statuses =
      Meet({Options(0, 2, port), Options(2, 3, port)}, std::move(listener)).statuses;
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), "rank 0 of 2 met rank 2 of 3"))
      << statuses[0];
  EXPECT_TRUE(absl::StrContains(statuses[1].message(), "rank 2 of 3 met rank 0 of 2"))
      << statuses[1];
}

// The first process stays. The second one ends, and the job goes on.
TEST(Rendezvous, ASecondProcessOfARankIsTurnedAway) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  std::thread second;
  absl::Status end_of_second;
  const Outcome outcome = Meet({Options(0, 3, port), Options(1, 3, port), Options(2, 3, port)},
                               std::move(listener), [&] {
                                 second = std::thread([&, port] {
                                   RendezvousOptions options = Options(1, 3, port);
                                   options.timeout = seconds(10);
                                   end_of_second = Rendezvous(options).status();
                                 });
                               });
  second.join();
  // One of the two processes that say that they are rank 1 came first.
  const absl::Status& other = outcome.statuses[1].ok() ? end_of_second : outcome.statuses[1];
  EXPECT_EQ(outcome.statuses[0], absl::OkStatus());
  EXPECT_EQ(outcome.statuses[2], absl::OkStatus());
  EXPECT_FALSE(other.ok());
}

TEST(Rendezvous, TwoProcessesOfOneRankAreNamed) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  std::vector<RendezvousOptions> ranks = {Options(0, 3, port), Options(1, 3, port),
                                          Options(1, 3, port)};
  for (RendezvousOptions& options : ranks) options.timeout = seconds(3);
  const auto statuses = Meet(ranks, std::move(listener)).statuses;
  EXPECT_TRUE(
      absl::StrContains(statuses[0].message(), "rank 0 waited 3 s in vain for rank 2 of 3; "))
      << statuses[0];
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), "do two processes have one rank?"));
  const auto says = [&](const char* text) {
    return absl::StrContains(statuses[1].message(), text) ||
           absl::StrContains(statuses[2].message(), text);
  };
  EXPECT_TRUE(says("times that another process is rank 1")) << statuses[1] << statuses[2];
  EXPECT_FALSE(statuses[1].ok());
  EXPECT_FALSE(statuses[2].ok());
}

// Another job's rank 0 waits at the first port, so this job takes the next free one.
TEST(Rendezvous, TwoJobsOnOneHost) {
  Socket taken = ListenSomewhere();
  const int port = taken.port();
  RendezvousOptions other = Options(0, 2, port);
  other.job = "another";
  other.timeout = seconds(3);
  std::thread other_job([&] {
    const absl::Status status = Rendezvous(other, std::move(taken)).status();
    EXPECT_EQ(status.message(), "rank 0 waited 3 s in vain for rank 1 of 2") << "no strangers";
  });
  std::vector<RendezvousOptions> ranks = AllOptions(2, port);
  ranks[0].num_ports = ranks[1].num_ports = 16;
  ExpectOk(Meet(ranks));
  other_job.join();
}

// Each of these ended the job, crashed it or stopped it for a second.
TEST(Rendezvous, StrangersAreTurnedAwayAndCounted) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  std::vector<Socket> strangers;
  const auto says = [&](const void* words, size_t bytes) {
    strangers.push_back(Call(port));
    ASSERT_TRUE(strangers.back().Write(words, bytes, In(seconds(5))).ok());
  };
  const Outcome outcome = Meet(AllOptions(3, port), std::move(listener), [&] {
    for (const std::string words : {"GET / HTTP/1.1\r\n\r\nAccept: nothing at all of what there is",
                                    "?", "\x16\x03\x01\x02"}) {
      says(words.data(), words.size());
    }
    const std::string noise(1 << 20, '\xff');
    strangers.push_back(Call(port));
    (void)strangers.back().Write(noise.data(), noise.size(), In(milliseconds(500)));
    strangers.push_back(Call(port));
    strangers.back().Close();  // a port scanner
    // A stranger may know the job's name, because it is not secret. Claiming a rank, whether or not
    // the job has it, does not prove anything.
    for (const Claim& claim : {Claim{7, 0, 3}, Claim{1, 0, 3}, Claim{~0u, 0, ~0u}}) {
      std::string words;
      const HelloBytes hello = ToBytes(Hello{JobTag("test"), RandomNonce()});
      const ClaimBytes bytes = ToBytes(claim);
      words.append(hello.begin(), hello.end());
      words.append(bytes.begin(), bytes.end());
      says(words.data(), words.size());
      EXPECT_TRUE(IsHungUp(strangers.back()));
    }
  });
  ExpectOk(outcome);
  EXPECT_EQ(outcome.strangers[0], 8);
}

// Silent connections are polled in parallel, so no rank waits for them.
TEST(Rendezvous, SilentConnectionsDelayNobody) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  std::vector<Socket> silent;
  const auto start = steady_clock::now();
  const Outcome outcome = Meet(AllOptions(3, port), std::move(listener), [&] {
    // More connections than rank 0 keeps.
    for (int i = 0; i < 300; ++i) silent.push_back(Call(port));
  });
  ExpectOk(outcome);
  EXPECT_EQ(outcome.strangers[0], 300);
  EXPECT_LT(steady_clock::now() - start, seconds(5));
}

TEST(Rendezvous, ASilentConnectionIsHungUpAfterItsTime) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  RendezvousOptions zero = Options(0, 2, port);
  zero.greeting_timeout = milliseconds(200);
  zero.timeout = seconds(3);
  const Outcome outcome = Meet({zero, Options(1, 2, port)}, std::move(listener), [&] {
    const Socket silent = Call(port);
    EXPECT_TRUE(IsHungUp(silent));
  });
  ExpectOk(outcome);
  EXPECT_EQ(outcome.strangers[0], 1);
}

// Listeners on the ports before rank 0's are silent, or talk.
TEST(Rendezvous, StrangersThatListenDelayNobody) {
  std::vector<Socket> listeners;
  int port = 0;
  for (int tries = 0; listeners.size() < 16 && tries < 200; ++tries) {
    auto next = Listen("127.0.0.1", listeners.empty() ? 0 : listeners.back().port() + 1);
    if (!next.ok()) listeners.clear();
    if (!next.ok()) continue;
    listeners.push_back(*std::move(next));
    port = listeners.front().port();
  }
  ASSERT_EQ(listeners.size(), 16u);
  listeners.pop_back();  // the port of rank 0, which nobody else has
  std::vector<RendezvousOptions> ranks = AllOptions(2, port);
  ranks[0].num_ports = ranks[1].num_ports = 16;
  const auto start = steady_clock::now();
  ExpectOk(Meet(ranks));
  EXPECT_LT(steady_clock::now() - start, seconds(5));
}

TEST(Rendezvous, AnotherTokenIsAStrangers) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  std::vector<RendezvousOptions> ranks = AllOptions(2, port);
  ranks[0].timeout = ranks[1].timeout = seconds(1);
  ranks[1].token = "not the token of this test";
  const auto statuses = Meet(ranks, std::move(listener)).statuses;
  EXPECT_TRUE(
      absl::StrContains(statuses[0].message(), "rank 0 waited 1 s in vain for rank 1 of 2; "))
      << statuses[0];
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), "did not prove the job's token; "));
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), "of them named this job: do all processes"));
  EXPECT_TRUE(absl::StrContains(statuses[1].message(), "found no rank 0")) << statuses[1];
}

// A process between the ranks listens at one of the ports that rank 1 calls. Each side puts the
// port that it knows into its proof.
TEST(Rendezvous, AGreetingThatIsHandedOnProvesNothing) {
  Socket middle = ListenSomewhere(), listener = ListenSomewhere();
  const int port = listener.port(), called = middle.port();
  Relay relay(std::move(middle), "127.0.0.1", port);
  std::vector<RendezvousOptions> ranks = {Options(0, 2, port), Options(1, 2, called)};
  for (RendezvousOptions& options : ranks) options.timeout = seconds(2);
  const auto statuses = Meet(ranks, std::move(listener)).statuses;
  EXPECT_TRUE(absl::StrContains(statuses[0].message(), "in vain for rank 1")) << statuses[0];
  EXPECT_TRUE(absl::StrContains(statuses[1].message(), "found no rank 0")) << statuses[1];
  const std::string recorded = relay.recorded();
  EXPECT_GE(recorded.size(), kHelloBytes + kClaimBytes);
  EXPECT_FALSE(absl::StrContains(recorded, kToken));
}

// The relay does not keep the ranks from each other, although it answers sooner.
TEST(Rendezvous, ARelayOnAnEarlierPortDelaysNobody) {
  std::vector<Socket> two;
  for (int tries = 0; two.size() < 2 && tries < 200; ++tries) {
    auto next = Listen("127.0.0.1", two.empty() ? 0 : two.back().port() + 1);
    if (!next.ok()) two.clear();
    if (next.ok()) two.push_back(*std::move(next));
  }
  ASSERT_EQ(two.size(), 2u);
  const int port = two[0].port();
  const Relay relay(std::move(two[0]), "127.0.0.1", port + 1);
  std::vector<RendezvousOptions> ranks = AllOptions(2, port);
  ranks[1].num_ports = 2;
  ExpectOk(Meet(ranks, std::move(two[1])));
}

// The relay records everything that rank 1 says to rank 0, and repeats it to the rank 0 of a second
// run.
TEST(Rendezvous, AReplayedGreetingProvesNothing) {
  // The relay has rank 0's port at another address of this host, which no proof names.
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  absl::StatusOr<Socket> middle = Listen("127.0.0.2", port);
  ASSERT_TRUE(middle.ok()) << middle.status();
  std::string recorded;
  {
    Relay relay(*std::move(middle), "127.0.0.1", port);
    std::vector<RendezvousOptions> ranks = AllOptions(2, port);
    ranks[1].address = "127.0.0.2";
    ExpectOk(Meet(ranks, std::move(listener)));
    recorded = relay.recorded();
  }
  ASSERT_GE(recorded.size(), kHelloBytes + kClaimBytes);
  EXPECT_FALSE(absl::StrContains(recorded, kToken));

  Socket again = ListenSomewhere();
  const int second = again.port();
  const Outcome outcome = Meet(AllOptions(2, second), std::move(again), [&] {
    const Socket stranger = Call(second);
    ASSERT_TRUE(stranger.Write(recorded.data(), recorded.size(), In(seconds(5))).ok());
    EXPECT_TRUE(IsHungUp(stranger));
  });
  ExpectOk(outcome);
  EXPECT_EQ(outcome.strangers[0], 1);
}

// The sockets between the other ranks ask for proofs, too, because a stranger may find out where
// rank 1 listens.
TEST(Rendezvous, RanksBelowAreCalledWithProofs) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  ExpectOk(Meet(AllOptions(3, port), std::move(listener)));
}

// Rank 0 takes a port as soon as one is free.
TEST(Rendezvous, HeldPortsAreWaitedFor) {
  Socket held = ListenSomewhere();
  const int port = held.port();
  std::thread holder([&] {
    std::this_thread::sleep_for(seconds(1));
    held.Close();
  });
  ExpectOk(Meet(AllOptions(2, port)));
  holder.join();

  Socket for_ever = ListenSomewhere();
  RendezvousOptions options = Options(0, 2, for_ever.port());
  options.timeout = milliseconds(300);
  EXPECT_EQ(Rendezvous(options).status(),
            absl::UnavailableError(
                absl::StrCat("rank 0 waited 0.3 s in vain: no port is free from ", for_ever.port(),
                             " to ", for_ever.port(), "; MASTER_PORT says where rank 0 listens")));
}

// The interfaces on which a job of several hosts listens. The name of rank 0's host may be
// 127.0.1.1 there.
TEST(Rendezvous, RankZeroListensWhereTheOthersReachIt) {
  const auto address_of = [](bool several_hosts, const std::string& address) {
    Socket holder = *Listen("", 0);  // finds a free port
    const int port = holder.port();
    holder.Close();
    RendezvousOptions zero = Options(0, 2, port);
    zero.several_hosts = several_hosts;
    zero.address = address;
    zero.timeout = milliseconds(500);
    std::string rows;
    std::thread rank0([&] { (void)Rendezvous(zero).status(); });
    const std::string wanted = absl::StrCat(":", absl::Hex(port, absl::kZeroPad4), " ");
    for (int i = 0; i < 1000 && rows.empty(); ++i) {
      for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        FILE* file = std::fopen(table, "r");
        char line[512];
        while (file != nullptr && std::fgets(line, sizeof(line), file) != nullptr) {
          std::string row = line;
          for (char& c : row) c = static_cast<char>(std::tolower(c));
          if (absl::StrContains(row, wanted) && absl::StrContains(row, " 0a ")) rows = row;
        }
        if (file != nullptr) std::fclose(file);
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    rank0.join();
    const size_t begin = rows.find(": ") + 2;
    return rows.substr(begin, rows.find(':', begin) - begin);
  };
  const std::string loopback = "0100007f", all = std::string(32, '0');
  EXPECT_EQ(address_of(false, "anything"), loopback);
  EXPECT_EQ(address_of(true, "localhost"), all) << "as a host's name that is 127.0.1.1 at home";
  EXPECT_EQ(address_of(true, "192.0.2.1"), all) << "not an address of this host";
}

}  // namespace
}  // namespace burst
