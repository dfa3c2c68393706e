// Tests the mail between GPUs of processes. The processes share the GPUs that there are, so that
// one GPU is enough.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/failure.h"
#include "burst/comm/gpu/peer_mail.h"
#include "burst/comm/tcp/rendezvous.h"
#include "burst/comm/tcp/socket.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "burst/device/device.h"
#include "tests/comm/communicator_message_checks.h"
#include "tests/comm/local_rendezvous.h"

namespace burst {
namespace {

using Clock = std::chrono::steady_clock;

// What a process has.
struct Rank {
  explicit Rank(Communicator* host, FailureState* failure)
      : host(host), failure(failure), mails(failure) {}
  Communicator* const host;
  FailureState* const failure;
  PeerMails mails;
};

// Runs body(rank) in N processes. Each ends with the exit code 1 if an expectation failed. A
// process is killed after a minute. Returns the exit codes, negative for signals.
std::vector<int> RunProcesses(int size, const std::function<void(Rank&)>& body) {
  Socket listener = ListenSomewhere();
  const int port = listener.port();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < size; ++rank) {
    pids.push_back(fork());  // before this process uses a GPU
    if (pids.back() != 0) continue;
    alarm(60);
    setenv("BURST_IPC", "1", 1);
    if (rank != 0) listener.Close();
    auto met = Rendezvous(Options(rank, size, port), rank == 0 ? std::move(listener) : Listener());
    if (!met.ok()) std::_Exit(99);
    FailureState failure;
    TcpOptions options;
    options.ends_process = false;
    options.on_failure = [&](const absl::Status& status) { failure.Fail(status); };
    {
      const ScopedCudaDevice device(rank % CudaDeviceCount(), rank);
      const auto host = TcpCommunicator::Create(rank, std::move(met->links), options);
      Rank own(host.get(), &failure);
      body(own);
    }
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  }
  std::vector<int> codes;
  for (const pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return codes;
}

std::unique_ptr<PeerMail> MakeMail(Rank& rank) {
  auto mail = PeerMail::Create(rank.host, &rank.mails);
  EXPECT_TRUE(mail.ok()) << mail.status();
  EXPECT_TRUE(mail.ok() && *mail != nullptr) << "the processes do not reach each other's memory";
  if (!mail.ok() || *mail == nullptr) std::_Exit(1);  // the other ranks end, too
  return *std::move(mail);
}

// A communicator all of whose messages are mail.
class MailCommunicator : public Communicator {
 public:
  explicit MailCommunicator(Rank& rank) : rank_(rank), mail_(MakeMail(rank)) {}
  int rank() const override { return rank_.host->rank(); }
  int world_size() const override { return rank_.host->world_size(); }
  absl::Status Wait(Channel channel) override {
    mail_->Join(channel);
    return rank_.failure->failure();
  }
  void Abort(const absl::Status& reason) override { rank_.host->Abort(reason); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int, int) override {
    return absl::UnimplementedError("a test without groups");
  }

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override {
    return mail_->Post(channel, sends, receives);
  }

 private:
  Rank& rank_;
  const std::unique_ptr<PeerMail> mail_;
};

TEST(PeerMail, PassesTheChecksOfMessages) {
  for (const int size : {2, 3, 4}) {
    for (const auto check : {CheckRing, CheckOrdering, CheckChannels}) {
      const auto body = [&](Rank& rank) {
        MailCommunicator comm(rank);
        EXPECT_EQ(check(comm, {DeviceType::kCuda, /*fixed_order=*/true, /*posts_in_turn=*/true}),
                  absl::OkStatus());
        EXPECT_EQ(rank.host->Barrier(), absl::OkStatus());
      };
      EXPECT_EQ(RunProcesses(size, body), std::vector<int>(size, 0)) << size << " ranks";
    }
  }
}

// Messages of many lengths around the length of a piece and of a mailbox, on both channels, at
// addresses that are not aligned. No rank waits for its GPU between the Posts.
TEST(PeerMail, CarriesMessagesOfAnyLength) {
  const auto body = [](Rank& rank) {
    MailCommunicator comm(rank);
    const int64_t mailbox = PeerMail::kMailBytes / 2;
    std::deque<MessageBuffer> sent, received;
    std::vector<Bytes> expected;
    int number = 0;
    for (const int64_t bytes : {int64_t{1}, int64_t{4099}, mailbox / kMailSlots - 5,
                                mailbox / kMailSlots + 5, mailbox, mailbox + 77, 3 * mailbox}) {
      for (const Channel channel : {Channel::kRead, Channel::kGradient}) {
        sent.emplace_back(Message(bytes + 3, comm.rank(), Next(comm), number), DeviceType::kCuda);
        received.emplace_back(Bytes(bytes + 3), DeviceType::kCuda);
        Bytes& content =
            expected.emplace_back(Message(bytes + 3, Previous(comm), comm.rank(), number++));
        std::fill(content.begin(), content.begin() + 3, 0);
        SendBuffer send = sent.back().To(Next(comm));
        ReceiveBuffer receive = received.back().From(Previous(comm));
        send.data = static_cast<const char*>(send.data) + 3;
        receive.data = static_cast<char*>(receive.data) + 3;
        send.bytes = receive.bytes = bytes;
        EXPECT_EQ(comm.Post(channel, {&send, 1}, {&receive, 1}), absl::OkStatus());
      }
    }
    EXPECT_EQ(comm.Wait(Channel::kGradient), absl::OkStatus());
    EXPECT_EQ(comm.Wait(Channel::kRead), absl::OkStatus());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(received[i].Holds(expected[i])) << "message " << i;
    }
  };
  EXPECT_EQ(RunProcesses(2, body), (std::vector<int>{0, 0}));
}

TEST(PeerMail, TakesShortMessagesOfRingsOnly) {
  const auto body = [](Rank& rank) {
    const auto mail = MakeMail(rank);
    const int64_t most = PeerMail::kMostBytes;
    EXPECT_TRUE(mail->Takes(Channel::kRead, 0, 1, most));
    EXPECT_TRUE(mail->Takes(Channel::kGradient, 4, 1, most));   // 2 = 5 / 2 ranks ahead
    EXPECT_FALSE(mail->Takes(Channel::kGradient, 1, 4, most));  // 3 ranks ahead
    EXPECT_FALSE(mail->Takes(Channel::kRead, 0, 1, most + 1));
    EXPECT_FALSE(mail->Takes(Channel::kCollective, 0, 1, 1));
  };
  EXPECT_EQ(RunProcesses(5, body), std::vector<int>(5, 0));
}

// The sender's host goes on though the receiver posts late, and its tensor may change after the
// Wait in the order of the stream.
TEST(PeerMail, NoHostWaitsForAnother) {
  const auto body = [](Rank& rank) {
    MailCommunicator comm(rank);
    const int64_t bytes = PeerMail::kMailBytes;  // twice a mailbox
    MessageBuffer buffer(comm.rank() == 0 ? Message(bytes, 0, 1, 5) : Bytes(bytes),
                         DeviceType::kCuda);
    EXPECT_EQ(rank.host->Barrier(), absl::OkStatus());
    if (comm.rank() == 0) {
      const auto begin = Clock::now();
      const SendBuffer send = buffer.To(1);
      EXPECT_EQ(comm.Post(Channel::kRead, {&send, 1}, {}), absl::OkStatus());
      EXPECT_EQ(comm.Wait(Channel::kRead), absl::OkStatus());
      EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(500));
      buffer.Set(Bytes(bytes));
    } else {
      usleep(1'000'000);
      const ReceiveBuffer receive = buffer.From(0);
      EXPECT_EQ(comm.Post(Channel::kRead, {}, {&receive, 1}), absl::OkStatus());
      EXPECT_EQ(comm.Wait(Channel::kRead), absl::OkStatus());
      EXPECT_TRUE(buffer.Holds(Message(bytes, 0, 1, 5)));
    }
    EXPECT_EQ(rank.host->Barrier(), absl::OkStatus());
  };
  EXPECT_EQ(RunProcesses(2, body), (std::vector<int>{0, 0}));
}

// A rank that is killed leaves another one's streams waiting, which the failure ends.
TEST(PeerMail, AKilledRankFreesTheOther) {
  const auto body = [](Rank& rank) {
    auto comm = std::make_unique<MailCommunicator>(rank);
    const MessageBuffer sent(Bytes(4 * PeerMail::kMailBytes), DeviceType::kCuda);
    const MessageBuffer received(Bytes(100), DeviceType::kCuda);
    if (comm->rank() == 1) {
      (void)rank.host->Barrier();
      raise(SIGKILL);
    }
    const SendBuffer send = sent.To(1);
    const ReceiveBuffer receive = received.From(1);
    EXPECT_EQ(comm->Post(Channel::kRead, {&send, 1}, {&receive, 1}), absl::OkStatus());
    (void)rank.host->Barrier();
    (void)comm->Wait(Channel::kRead);
    while (!rank.failure->failed()) usleep(1000);
    rank.mails.Free();
    SynchronizeDevice(DeviceType::kCuda);
    EXPECT_TRUE(absl::StrContains(comm->Post(Channel::kRead, {&send, 1}, {}).message(),
                                  "rank 1 of 2 was lost"));
    comm = nullptr;
  };
  EXPECT_EQ(RunProcesses(2, body), (std::vector<int>{0, -SIGKILL}));
}

TEST(PeerMail, IsLeftOutOnAllRanksIfOneIsToldSo) {
  const auto body = [](Rank& rank) {
    if (rank.host->rank() == 1) setenv("BURST_IPC", "0", 1);
    const auto mail = PeerMail::Create(rank.host, &rank.mails);
    EXPECT_TRUE(mail.ok() && *mail == nullptr) << mail.status();
  };
  EXPECT_EQ(RunProcesses(3, body), std::vector<int>(3, 0));
}

TEST(PeerMail, RefusesOtherValuesOfTheVariable) {
  const auto body = [](Rank& rank) {
    if (rank.host->rank() == 1) setenv("BURST_IPC", "off", 1);
    const auto mail = PeerMail::Create(rank.host, &rank.mails);
    EXPECT_EQ(mail.ok(), rank.host->rank() == 0) << mail.status();
    EXPECT_TRUE(mail.ok() ||
                absl::StrContains(mail.status().message(), "BURST_IPC: must be 0 or 1; got off"));
  };
  EXPECT_EQ(RunProcesses(2, body), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace burst
