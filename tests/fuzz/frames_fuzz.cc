// Sends frames between two ranks over a socketpair. Rank 0 is a TcpCommunicator, and rank 1 is the
// input. They send messages of all kinds, short and long, and break the rules. As long as the rules
// are kept, every message that a rank waits for arrives whole and in order. For any input, rank 0
// sends only frames, and every call returns.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "burst/base/check.h"
#include "burst/comm/tcp/frame.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace burst {
namespace {

std::string RandomBytes(int64_t size, uint32_t seed) {
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  return bytes;
}

// Rank 1's end of the connection.
class Wire {
 public:
  explicit Wire(int fd) : fd_(fd) {}
  ~Wire() { close(fd_); }

  // Sends bytes. Returns false if rank 0 does not read any more.
  bool Send(absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n > 0) bytes.remove_prefix(n);
      if (n < 0 && errno != EAGAIN) return false;
      Read();
      if (n < 0 && !Poll(POLLOUT)) return false;
    }
    return true;
  }
  bool Send(FrameKind kind, uint32_t channel, uint64_t group, uint64_t bytes,
            absl::string_view payload) {
    const FrameHeaderBytes header = ToBytes(FrameHeader{kind, channel, group, bytes});
    return Send({reinterpret_cast<const char*>(header.data()), header.size()}) && Send(payload);
  }

  // Reads all frames that have come, and keeps their messages by channel.
  void Read() {
    if (deaf) return;
    char piece[65536];
    ssize_t n;
    while ((n = recv(fd_, piece, sizeof(piece), 0)) > 0) in_.append(piece, n);
    while (in_.size() >= kFrameHeaderBytes) {
      const auto frame = ParseFrameHeader(
          absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(in_.data()), kFrameHeaderBytes));
      BURST_CHECK(frame.ok()) << frame.status().ToString();
      const size_t whole = kFrameHeaderBytes + PayloadBytes(*frame);
      if (in_.size() < whole) return;
      const std::string payload = in_.substr(kFrameHeaderBytes, whole - kFrameHeaderBytes);
      in_.erase(0, whole);
      if (frame->kind == FrameKind::kMessage) received[frame->channel].push_back(payload);
      if (frame->kind == FrameKind::kAnnounce) announced[frame->channel].push_back(frame->bytes);
      if (frame->kind == FrameKind::kPiece) pieces[frame->channel] += payload;
      if (frame->kind == FrameKind::kGo) ++goes[frame->channel];
      if (frame->kind == FrameKind::kFailed) failed = true;
    }
  }

  // Reads until `done` says so. Returns false if that takes too long or rank 0 failed.
  template <typename Done>
  bool ReadUntil(Done done) {
    while (true) {
      Read();
      if (done()) return true;
      if (failed || deaf || !Poll(POLLIN)) return false;
    }
  }

  void Close() { shutdown(fd_, SHUT_WR); }

  std::array<std::deque<std::string>, kNumChannels> received;
  std::array<std::deque<uint64_t>, kNumChannels> announced;
  std::array<std::string, kNumChannels> pieces;
  std::array<int, kNumChannels> goes = {};
  bool failed = false;
  bool deaf = false;   // rank 0 does not read any more
  bool lawful = true;  // rank 1 has kept the rules so far, so rank 0 must answer

 private:
  bool Poll(short events) const {
    pollfd polled = {fd_, events, 0};
    int ready;
    do {  // libFuzzer's timer interrupts it
      ready = poll(&polled, 1, lawful && !failed ? 600000 : 20);
    } while (ready < 0 && errno == EINTR);
    return ready > 0 && (polled.revents & POLLHUP) == 0;
  }

  const int fd_;
  std::string in_;
};

class Talk {
 public:
  Talk(FuzzInput* input, std::unique_ptr<TcpCommunicator> rank0, int fd)
      : input_(*input), rank0_(std::move(rank0)), wire_(fd) {}

  void Run() {
    for (int i = 0; i < 40 && !input_.empty(); ++i) Act();
    if (wire_.lawful) CheckMessages();
    if (input_.Bool()) wire_.Send(FrameKind::kFinished, 0, 0, 0, "");
    wire_.Read();
    wire_.Close();
    for (int c = 0; c < kNumChannels; ++c) {
      const absl::Status status = rank0_->Wait(static_cast<Channel>(c));
      BURST_CHECK(status.ok() || absl::IsUnavailable(status) || absl::IsInvalidArgument(status))
          << status.ToString();
    }
  }

 private:
  // Makes the next move of one of the two ranks.
  void Act() {
    const int c = static_cast<int>(input_.Integer(0, kNumChannels - 1));
    switch (input_.Integer(0, 8)) {
      case 0:
        wire_.lawful = false;
        wire_.Send(input_.Text(64));
        break;
      case 1:
        SendAnyFrame();
        break;
      case 2: {  // a short message, expected or not yet
        const std::string message = RandomBytes(input_.Integer(1, 300), ++seed_);
        wire_.Send(FrameKind::kMessage, c, 0, message.size(), message);
        sent_[c].push_back(message);
        break;
      }
      case 3:  // the next message or a later one, of a length that may be wrong
        Receive(c, received_[c].size() < sent_[c].size()
                       ? static_cast<int64_t>(sent_[c][received_[c].size()].size())
                       : input_.Integer(1, 300));
        break;
      case 4:
        SendLong(c);
        break;
      case 5:
      case 6:
        Post(c, input_.Bool() ? input_.Integer(1, 300) : 66000 + input_.Integer(0, 300000));
        break;
      case 7:
        wire_.lawful = false;
        wire_.Send(FrameKind::kFinished, 0, 0, 0, "");
        break;
      case 8:
        wire_.lawful = false;
        wire_.deaf = true;
        break;
    }
    wire_.Read();
  }

  void SendAnyFrame() {
    wire_.lawful = false;
    constexpr uint64_t kGroups[] = {0, 0, 1, uint64_t{1} << 63};
    constexpr uint64_t kBytes[] = {0,      1,      20,         65536,      65537,
                                   262144, 262145, 1ull << 40, 1ull << 63, ~0ull};
    const auto kind = static_cast<FrameKind>(input_.Integer(0, 8));
    const auto channel = static_cast<uint32_t>(input_.Integer(0, kNumChannels));
    const uint64_t group = input_.Pick(kGroups), bytes = input_.Pick(kBytes);
    wire_.Send(kind, channel, group, bytes, RandomBytes(input_.Integer(0, 70000), ++seed_));
  }

  void Receive(int c, int64_t bytes) {
    received_[c].push_back(std::make_unique<std::string>(bytes, '\0'));
    const ReceiveBuffer receive = {received_[c].back()->data(), bytes, 1};
    CheckPosted(rank0_->Post(static_cast<Channel>(c), {}, {&receive, 1}));
  }

  void Post(int c, int64_t bytes) {
    posted_[c].push_back(std::make_unique<std::string>(RandomBytes(bytes, ++seed_)));
    const SendBuffer send = {posted_[c].back()->data(), bytes, 1};
    CheckPosted(rank0_->Post(static_cast<Channel>(c), {&send, 1}, {}));
  }

  void CheckPosted(const absl::Status& status) const {
    BURST_CHECK(status.ok() || (!wire_.lawful && absl::IsUnavailable(status))) << status.ToString();
  }

  // Announces a long message. Its pieces leave when rank 0 has asked for it, if it has a buffer.
  void SendLong(int c) {
    const std::string message = RandomBytes(66000 + input_.Integer(0, 400000), ++seed_);
    const bool in_turn = received_[c].size() == sent_[c].size();
    wire_.Send(FrameKind::kAnnounce, c, 0, message.size(), "");
    sent_[c].push_back(message);
    if (!in_turn) {  // rank 0 would not ask for the message
      wire_.lawful = false;
      return;
    }
    Receive(c, static_cast<int64_t>(message.size()));
    const bool asked = wire_.ReadUntil([&] { return wire_.goes[c] > 0; });
    BURST_CHECK(asked || !wire_.lawful) << "rank 0 does not ask for a message that it waits for";
    if (!asked) return;
    --wire_.goes[c];
    for (size_t at = 0; at < message.size();) {
      // The input chooses the lengths of pieces. At its end it returns the least value, so the rest
      // goes in the longest pieces.
      const size_t piece = input_.empty() ? kMaxPieceBytes : input_.Integer(1, kMaxPieceBytes);
      const size_t n = std::min(message.size() - at, piece);
      wire_.Send(FrameKind::kPiece, c, 0, n, absl::string_view(message).substr(at, n));
      at += n;
    }
  }

  void CheckMessages() {
    for (int c = 0; c < kNumChannels; ++c) {
      // Rank 0's short messages have left. Its long ones are asked for.
      std::deque<std::string> shorts;
      std::string longs;
      int announced = 0;
      for (const auto& message : posted_[c]) {
        if (message->size() <= kMaxEagerBytes) {
          shorts.push_back(*message);
        } else {
          longs += *message;
          ++announced;
        }
      }
      BURST_CHECK(wire_.ReadUntil([&] {
        return wire_.received[c].size() == shorts.size() &&
               static_cast<int>(wire_.announced[c].size()) == announced;
      })) << "a message does not leave";
      for (int i = 0; i < announced; ++i) wire_.Send(FrameKind::kGo, c, 0, 0, "");
      BURST_CHECK(wire_.ReadUntil([&] { return wire_.pieces[c].size() >= longs.size(); }))
          << "a long message does not leave";
      BURST_CHECK(wire_.received[c] == shorts && wire_.pieces[c] == longs) << "other bytes";
      // Rank 1's messages: was everything sent that rank 0 waits for, and does it fit?
      bool all_fit = received_[c].size() <= sent_[c].size();
      for (size_t i = 0; all_fit && i < received_[c].size(); ++i) {
        all_fit = received_[c][i]->size() == sent_[c][i].size();
      }
      if (!all_fit) continue;
      const absl::Status status = rank0_->Wait(static_cast<Channel>(c));
      BURST_CHECK(status.ok()) << status.ToString();
      for (size_t i = 0; i < received_[c].size(); ++i) {
        BURST_CHECK(*received_[c][i] == sent_[c][i]) << "other bytes in message " << i;
      }
    }
  }

  FuzzInput& input_;
  uint32_t seed_ = 0;
  // Buffers outlive the communicator.
  std::array<std::vector<std::string>, kNumChannels> sent_;  // messages of rank 1
  std::array<std::vector<std::unique_ptr<std::string>>, kNumChannels> received_, posted_;
  std::unique_ptr<TcpCommunicator> rank0_;
  Wire wire_;  // closed first
};

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  int fds[2];
  BURST_CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  if (input.Bool()) {  // makes rank 0's frames wait for rank 1 to read
    const int bytes = 4096;
    setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
  }
  std::vector<PeerLink> links(2);
  links[1].socket = Socket(fds[0]);
  Talk(&input, TcpCommunicator::Create(0, std::move(links), TcpOptions()), fds[1]).Run();
}

}  // namespace burst
