// Tests ranks that are connected by sockets. They are threads, which is quick.
#include "burst/comm/tcp/tcp_communicator.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/tcp/frame.h"
#include "burst/comm/tcp/greeting.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/socket.h"
#include "burst/comm/thread/thread_communicator.h"
#include "tests/comm/communicator_checks.h"
#include "tests/comm/local_rendezvous.h"
#include "tests/comm/relay.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

enum class Over { kTcp, kFolder };

// Runs ranks as RunRanks does, over sockets. Returns every rank's status.
std::vector<absl::Status> RunTcpRanks(int world_size,
                                      const std::function<absl::Status(TcpCommunicator&)>& body,
                                      Over over = Over::kTcp) {
  std::optional<SocketFolder> folder;
  if (over == Over::kFolder) folder = FolderAt(FreshTestFolder());
  Listener listener;
  if (over == Over::kTcp) listener = ListenSomewhere();
  const int port = listener.port();
  std::vector<absl::Status> results(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      results[rank] = [&]() -> absl::Status {
        RendezvousOptions options = Options(rank, world_size, port);
        options.folder = folder;
        BURST_ASSIGN_OR_RETURN(Connections met,
                               Rendezvous(options, rank == 0 ? std::move(listener) : Listener()));
        return body(*TcpCommunicator::Create(rank, std::move(met.links), TcpOptions()));
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

class TcpRanks : public testing::TestWithParam<std::tuple<int, Over>> {};

std::string NameOfCase(const testing::TestParamInfo<TcpRanks::ParamType>& info) {
  const bool sealed = std::get<1>(info.param) == Over::kTcp;
  return absl::StrCat(sealed ? "Sealed" : "InAFolder", std::get<0>(info.param));
}
INSTANTIATE_TEST_SUITE_P(All, TcpRanks,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(Over::kTcp, Over::kFolder)),
                         NameOfCase);

TEST_P(TcpRanks, Checks) {
  const auto [ranks, over] = GetParam();
  const auto check_all = [](TcpCommunicator& comm) {
    for (const CommunicatorCheck& check : CommunicatorChecks()) {
      SCOPED_TRACE(check.name);
      BURST_RETURN_IF_ERROR(check.run(comm, {}));
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunTcpRanks(ranks, check_all, over), std::vector<absl::Status>(ranks));
}

// The bits of an all-reduce do not depend on the transport.
TEST_P(TcpRanks, SumsEqualThoseOfThreads) {
  const auto [ranks, over] = GetParam();
  std::vector<uint64_t> here(ranks), there(ranks);
  const auto digest = [](std::vector<uint64_t>& digests) {
    return [&](Communicator& comm) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(digests[comm.rank()], AllReduceDigest(comm));
      return absl::OkStatus();
    };
  };
  RunTcpRanks(ranks, digest(here), over);
  EXPECT_EQ(RunRanks(ranks, digest(there)), absl::OkStatus());
  EXPECT_EQ(here, there);
}

// Results of two ranks with a relay between them. No proof names the relay, although it has rank
// 0's port at another address. Rank 0 sends a message of `bytes` bytes, all 'm', which rank 1
// receives.
struct Relayed {
  std::vector<absl::Status> statuses = std::vector<absl::Status>(2);
  std::string received;
};
Relayed SendThroughRelay(int64_t bytes, const Relay::Change& change) {
  Relayed result;
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  absl::StatusOr<Socket> middle = Listen("127.0.0.2", port);
  EXPECT_TRUE(middle.ok()) << middle.status();
  const Relay relay(*std::move(middle), "127.0.0.1", port, change);
  result.received.resize(bytes);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      result.statuses[rank] = [&]() -> absl::Status {
        RendezvousOptions options = Options(rank, 2, port);
        if (rank == 1) options.address = "127.0.0.2";
        BURST_ASSIGN_OR_RETURN(Connections met,
                               Rendezvous(options, rank == 0 ? std::move(listener) : Listener()));
        const auto comm = TcpCommunicator::Create(rank, std::move(met.links), TcpOptions());
        const std::string message(bytes, 'm');
        const SendBuffer send = {message.data(), bytes, 1};
        const ReceiveBuffer receive = {&result.received[0], bytes, 0};
        if (rank == 0) BURST_RETURN_IF_ERROR(comm->Post(Channel::kRead, {&send, 1}, {}));
        if (rank == 1) BURST_RETURN_IF_ERROR(comm->Post(Channel::kRead, {}, {&receive, 1}));
        BURST_RETURN_IF_ERROR(comm->Wait(Channel::kRead));
        return comm->Barrier();
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

// A relay between the hosts can neither read nor change the messages. The first changed frame ends
// the job. The change may be in the header, the payload or the tag, of a short message or of a
// piece.
TEST(TcpCommunicator, ARelayReadsAndChangesNothing) {
  for (const int64_t bytes : {100, 300'000}) {
    SCOPED_TRACE(bytes);
    std::string seen;
    const Relayed whole =
        SendThroughRelay(bytes, [&](bool from_caller, int64_t, std::string* text) {
          if (!from_caller) seen += *text;
        });
    EXPECT_EQ(whole.statuses, std::vector<absl::Status>(2));
    EXPECT_EQ(whole.received, std::string(bytes, 'm'));
    EXPECT_GT(static_cast<int64_t>(seen.size()), bytes);
    EXPECT_FALSE(absl::StrContains(seen, "mmmmmmmm"));
    // After the greeting, the answer and the list of places come a frame's header, its tag and
    // more.
    const int64_t begin =
        kHelloBytes + kClaimBytes + 1 + Seal::kTagBytes + 2 * kPlaceBytes + Seal::kTagBytes;
    for (const int64_t at : {begin, begin + 20, begin + 24, begin + 45, begin + 100}) {
      const Relayed changed =
          SendThroughRelay(bytes, [at](bool from_caller, int64_t before, std::string* text) {
            const int64_t here = at - before;
            if (!from_caller && here >= 0 && here < static_cast<int64_t>(text->size())) {
              (*text)[here] ^= 1;
            }
          });
      EXPECT_TRUE(absl::StartsWith(changed.statuses[1].message(),
                                   "rank 0 of 2 sent a frame that was changed on its way"))
          << at << ": " << changed.statuses[1];
      EXPECT_FALSE(changed.statuses[0].ok());
    }
  }
}

TEST(TcpCommunicator, LengthsMustAgree) {
  const auto results = RunTcpRanks(2, [](TcpCommunicator& comm) {
    char out[16] = {}, in[16];
    const SendBuffer send = {out, comm.rank() == 0 ? 16 : 8, 1 - comm.rank()};
    const ReceiveBuffer receive = {in, 16, 1 - comm.rank()};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    return comm.Wait(Channel::kRead);
  });
  EXPECT_EQ(results[0],
            absl::InvalidArgumentError("rank 0 of 2 expected 16 bytes from rank 1, which sent 8"));
  EXPECT_EQ(results[1], absl::OkStatus());
}

TEST(TcpCommunicator, WaitingForARankThatHasFinishedIsAnError) {
  const auto results = RunTcpRanks(3, [](TcpCommunicator& comm) {
    if (comm.rank() == 1) return absl::OkStatus();
    char byte;
    const ReceiveBuffer receive = {&byte, 1, 1};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive, 1}));
    return comm.Wait(Channel::kRead);
  });
  EXPECT_EQ(results[0], absl::UnavailableError("rank 0 of 3 waits for rank 1, which has finished"));
  EXPECT_EQ(results[2].code(), absl::StatusCode::kUnavailable);
}

TEST(TcpCommunicator, CarriesHostMemoryOnly) {
  const auto results = RunTcpRanks(1, [](TcpCommunicator& comm) {
    char byte;
    const SendBuffer send = {&byte, 1, 0, DeviceType::kCuda};
    return comm.Post(Channel::kRead, {&send, 1}, {});
  });
  EXPECT_EQ(results[0], absl::InvalidArgumentError("TCP carries host memory only"));
}

// Messages have lengths around the limits of frames. They go in both directions at once, on all
// channels, also within groups.
TEST(TcpCommunicator, MessagesOfEveryLength) {
  constexpr int64_t kLengths[] = {1,      65535,  65536,   65537,        262144,
                                  262145, 524288, 1000003, (2 << 20) + 7};
  const auto results = RunTcpRanks(3, [&](TcpCommunicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto group, comm.Split(0, -comm.rank()));
    const int next = (comm.rank() + 1) % 3, last = (comm.rank() + 2) % 3;
    const auto text_of = [](int rank, int64_t length) {
      std::string text(length, '\0');
      for (int64_t i = 0; i < length; ++i) text[i] = static_cast<char>(i * 31 + i / 251 + rank);
      return text;
    };
    std::vector<std::string> sent, received;
    for (int64_t length : kLengths) {
      sent.push_back(text_of(comm.rank(), length));
      received.resize(received.size() + 2 * kNumChannels, std::string(length, '\0'));
    }
    size_t place = 0;
    for (const std::string& text : sent) {
      const auto bytes = static_cast<int64_t>(text.size());
      for (int channel = 0; channel < kNumChannels; ++channel) {
        SendBuffer send = {text.data(), bytes, next};
        ReceiveBuffer receive = {&received[place++][0], bytes, last};
        BURST_RETURN_IF_ERROR(comm.Post(Channel(channel), {&send, 1}, {&receive, 1}));
        // The group numbers its ranks in the opposite order.
        send.peer = 2 - next;
        receive = {&received[place++][0], bytes, 2 - last};
        BURST_RETURN_IF_ERROR(group->Post(Channel(channel), {&send, 1}, {&receive, 1}));
      }
    }
    for (int channel = 0; channel < kNumChannels; ++channel) {
      BURST_RETURN_IF_ERROR(comm.Wait(Channel(channel)));
      BURST_RETURN_IF_ERROR(group->Wait(Channel(channel)));
    }
    for (const std::string& text : received) {
      if (text != text_of(last, text.size())) {
        return absl::DataLossError(absl::StrCat("a message of ", text.size(), " bytes"));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_EQ(results, std::vector<absl::Status>(3));
}

int64_t ResidentBytes() {
  long total = 0, resident = 0;
  FILE* file = std::fopen("/proc/self/statm", "r");
  EXPECT_EQ(std::fscanf(file, "%ld %ld", &total, &resident), 2);
  std::fclose(file);
  return resident * sysconf(_SC_PAGESIZE);
}

// If the receiver of a long message does not wait yet, no other channel waits for the message, and
// nobody keeps a copy.
TEST(TcpCommunicator, ALongMessageWaitsWithItsSender) {
  constexpr int64_t kBytes = 64 << 20;
  std::string out(kBytes, 'x'), in(kBytes, 'y');
  const int64_t before = ResidentBytes();
  const auto results = RunTcpRanks(2, [&](TcpCommunicator& comm) -> absl::Status {
    char byte = 'z';
    if (comm.rank() == 0) {
      const SendBuffer longer = {out.data(), kBytes, 1}, shorter = {&byte, 1, 1};
      BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&longer, 1}, {}));
      BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&shorter, 1}, {}));
      return comm.Wait(Channel::kRead);
    }
    const ReceiveBuffer longer = {&in[0], kBytes, 0}, shorter = {&byte, 1, 0};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {}, {&shorter, 1}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
    usleep(200'000);
    EXPECT_LT(ResidentBytes() - before, 16 << 20);
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&longer, 1}));
    return comm.Wait(Channel::kRead);
  });
  EXPECT_EQ(results, std::vector<absl::Status>(2));
  EXPECT_EQ(in, out);
  EXPECT_LT(ResidentBytes() - before, 16 << 20);
}

// The rank's peer is this test, which breaks the rules of frames.
TEST(TcpCommunicator, AFrameThatBreaksTheRulesIsAnError) {
  const FrameHeader kMessage = {FrameKind::kMessage, 0, 0, 1};
  const auto frame = [&](FrameKind kind, uint64_t bytes) {
    FrameHeader header = kMessage;
    header.kind = kind;
    header.bytes = bytes;
    const FrameHeaderBytes text = ToBytes(header);
    return std::string(text.begin(), text.end());
  };
  const struct {
    std::string bytes, says;
  } bad[] = {
      {frame(FrameKind::kMessage, uint64_t{1} << 63),
       "a frame of kind 1 with 9223372036854775808 bytes, not 1 to 65536"},
      {frame(FrameKind::kFailed, ~uint64_t{0}),
       "a frame of kind 7 with 18446744073709551615 bytes"},
      {frame(static_cast<FrameKind>(77), 0), "a frame of the unknown kind 77"},
      {frame(FrameKind::kPiece, 100), "a piece of a message that nobody asked for"},
      {frame(FrameKind::kGo, 0), "an answer to a message that was not announced"},
      // The peer may send 100,000 bytes, and sends more.
      {frame(FrameKind::kAnnounce, 100'000) + frame(FrameKind::kPiece, 100'001),
       "a piece of a message that nobody asked for"},
  };
  for (const auto& [bytes, says] : bad) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    std::vector<PeerLink> links(2);
    links[1].socket = Socket(ends[0]);
    const Socket peer(ends[1]);
    const auto comm = TcpCommunicator::Create(0, std::move(links), TcpOptions());
    std::string data(100'000, '\0');
    const ReceiveBuffer receive = {&data[0], 100'000, 1};
    ASSERT_TRUE(comm->Post(Channel::kRead, {}, {&receive, 1}).ok());
    ASSERT_TRUE(peer.Write(bytes.data(), bytes.size(), steady_clock::now()).ok());
    const absl::Status status = comm->Wait(Channel::kRead);
    EXPECT_TRUE(absl::StartsWith(status.message(), "rank 1 of 2 sent " + says)) << status;
  }
}

// Messages that nobody waits for, each of another group, take at most the allowed memory.
TEST(TcpCommunicator, AnnouncementsTakeWhatIsAllowed) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  std::vector<PeerLink> links(2);
  links[1].socket = Socket(ends[0]);
  const Socket peer(ends[1]);
  TcpOptions options;
  options.unexpected_bytes = 64 << 20;
  const auto comm = TcpCommunicator::Create(0, std::move(links), options);
  const int64_t before = ResidentBytes();
  int64_t most = 0;
  absl::Status written;
  for (uint64_t group = 1; written.ok() && group < 1'000'000; group += 256) {
    std::string frames;
    for (uint64_t i = 0; i < 256; ++i) {
      const FrameHeaderBytes frame =
          ToBytes(FrameHeader{i % 2 == 0 ? FrameKind::kAnnounce : FrameKind::kMessage, 0, group + i,
                              i % 2 == 0 ? kMaxEagerBytes + 1 : 17});
      frames.append(frame.begin(), frame.end());
      if (i % 2 != 0) frames.append(17, 'x');
    }
    written = peer.Write(frames.data(), frames.size(), steady_clock::now() + milliseconds(10'000));
    most = std::max(most, ResidentBytes() - before);
  }
  EXPECT_FALSE(written.ok());
  char byte;
  const ReceiveBuffer receive = {&byte, 1, 1};
  EXPECT_EQ(comm->Post(Channel::kRead, {}, {&receive, 1}).message(),
            "rank 1 of 2 sent more messages than this rank waits for");
  EXPECT_LT(most, 80 << 20);
}

}  // namespace
}  // namespace burst
