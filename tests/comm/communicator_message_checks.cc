#include "tests/comm/communicator_message_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/types/span.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// Every rank sends size(source, destination) bytes to every rank, itself among them, in one Post.
template <typename Size>
absl::Status ExchangeAll(Communicator& comm, DeviceType device, Channel channel, Size size) {
  const int ranks = comm.world_size(), me = comm.rank();
  std::deque<MessageBuffer> sent, received;
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int peer = 0; peer < ranks; ++peer) {
    sent.emplace_back(Message(size(me, peer), me, peer, 0), device);
    received.emplace_back(size(peer, me), device);
    sends.push_back(sent.back().To(peer));
    receives.push_back(received.back().From(peer));
  }
  BURST_RETURN_IF_ERROR(comm.Post(channel, sends, receives));
  BURST_RETURN_IF_ERROR(comm.Wait(channel));
  for (int peer = 0; peer < ranks; ++peer) {
    EXPECT_TRUE(received[peer].Holds(Message(size(peer, me), peer, me, 0))) << "from rank " << peer;
  }
  return absl::OkStatus();
}

// Messages between two ranks arrive in the order in which they were posted, over any number of
// Posts. With `around`, every rank sends all messages before it receives any. Otherwise the last
// rank only receives.
absl::Status SendInOrder(Communicator& comm, DeviceType device, bool around) {
  constexpr int kMessages = 12;
  const auto size = [](int number) { return int64_t{1} << (2 * (number % 6)); };
  const int me = comm.rank(), next = Next(comm), previous = Previous(comm);
  std::deque<MessageBuffer> sent, received;
  for (int i = 0; i < kMessages; ++i) {
    sent.emplace_back(Message(size(i), me, next, i), device);
    received.emplace_back(size(i), device);
  }
  const auto send_all = [&] {
    for (int i = 0; i < kMessages; ++i) {
      const SendBuffer send = sent[i].To(next);
      BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {}));
    }
    return absl::OkStatus();
  };
  const bool sends = around || next != 0, receives = around || me != 0;
  if (around) BURST_RETURN_IF_ERROR(send_all());
  for (int i = 0; receives && i < kMessages; i += 3) {
    const ReceiveBuffer three[] = {received[i].From(previous), received[i + 1].From(previous),
                                   received[i + 2].From(previous)};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, three));
  }
  if (!around && sends) BURST_RETURN_IF_ERROR(send_all());
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  for (int i = 0; receives && i < kMessages; ++i) {
    EXPECT_TRUE(received[i].Holds(Message(size(i), previous, me, i))) << "message " << i;
  }
  return absl::OkStatus();
}

}  // namespace

Bytes Message(int64_t size, int source, int destination, int number) {
  Bytes bytes(size);
  const uint64_t key = (static_cast<uint64_t>(source) * 1000 + destination) * 1000 + number;
  for (int64_t i = 0; i < size; i += 16) {
    const PhiloxCounter random = Philox(key, 1, i / 16);
    std::memcpy(&bytes[i], random.data(), std::min<int64_t>(16, size - i));
  }
  return bytes;
}

absl::Status CheckUnevenSizes(Communicator& comm, const CheckOptions& options) {
  return ExchangeAll(comm, options.device, Channel::kGradient,
                     [](int from, int to) { return 1 + 37 * from + 101 * to; });
}

absl::Status CheckLargeMessages(Communicator& comm, const CheckOptions& options) {
  return ExchangeAll(comm, options.device, Channel::kRead,
                     [](int from, int to) { return (3 << 20) + 17 * from + to; });
}

absl::Status CheckZeroBytes(Communicator& comm, const CheckOptions& options) {
  comm.ResetStats();
  BURST_RETURN_IF_ERROR(ExchangeAll(comm, options.device, Channel::kRead, [](int from, int to) {
    return (from + to) % 2 == 0 ? 0 : 64;
  }));
  int peers = 0;
  for (int peer = 0; peer < comm.world_size(); ++peer) peers += (comm.rank() + peer) % 2;
  EXPECT_EQ(comm.stats().messages_sent[0], peers);
  EXPECT_EQ(comm.stats().bytes_sent[0], 64 * peers);
  const SendBuffer send = {nullptr, 0, 0, options.device};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {}));  // nobody receives it
  return comm.Wait(Channel::kRead);
}

absl::Status CheckRing(Communicator& comm, const CheckOptions& options) {
  constexpr int64_t kBytes = 100'000;
  const int ranks = comm.world_size(), me = comm.rank();
  const MessageBuffer a(Message(kBytes, me, 0, 7), options.device), b(kBytes, options.device);
  const MessageBuffer *block = &a, *incoming = &b;
  for (int transfer = 0; transfer < ranks; ++transfer) {
    const SendBuffer send = block->To(Next(comm));
    const ReceiveBuffer receive = incoming->From(Previous(comm));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    EXPECT_TRUE(block->Holds(Message(kBytes, (me - transfer + ranks) % ranks, 0, 7)))
        << "after transfer " << transfer;
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    std::swap(block, incoming);
  }
  EXPECT_TRUE(block->Holds(Message(kBytes, me, 0, 7))) << "back at its owner";
  return absl::OkStatus();
}

absl::Status CheckOrdering(Communicator& comm, const CheckOptions& options) {
  if (!options.posts_in_turn) BURST_RETURN_IF_ERROR(SendInOrder(comm, options.device, true));
  return SendInOrder(comm, options.device, false);
}

absl::Status CheckChannels(Communicator& comm, const CheckOptions& options) {
  constexpr int64_t kBytes = 1 << 20;  // more than a transport would buffer
  const int ranks = comm.world_size(), me = comm.rank(), next = Next(comm),
            previous = Previous(comm);
  const MessageBuffer read(Message(kBytes, me, next, 1), options.device);
  const MessageBuffer gradient(Message(kBytes, me, next, 2), options.device);
  const MessageBuffer read_in(Bytes(kBytes), options.device),
      gradient_in(Bytes(kBytes), options.device);
  const SendBuffer send_read = read.To(next), send_gradient = gradient.To(next);
  const ReceiveBuffer receive_read = read_in.From(previous),
                      receive_gradient = gradient_in.From(previous);

  // Rank 0 takes part in the read after the gradient has arrived. With posts_in_turn, a rank's send
  // goes with its receive. Otherwise every rank's send comes after its receive.
  const bool late = me == 0, alone = !options.posts_in_turn;
  const absl::Span<const SendBuffer> no_sends, read_sends(&send_read, 1);
  const absl::Span<const ReceiveBuffer> read_receives(&receive_read, 1);
  if (!late) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, alone ? no_sends : read_sends, read_receives));
  }
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&send_gradient, 1}, {&receive_gradient, 1}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
  EXPECT_TRUE(gradient_in.Holds(Message(kBytes, previous, me, 2)));
  if (late) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, read_sends, read_receives));
  } else if (alone) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, read_sends, {}));
  }
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(read_in.Holds(Message(kBytes, previous, me, 1)));

  // Rank 0 finishes its read before it starts the gradient that its receiver waits for first.
  if (ranks == 1) return absl::OkStatus();
  if (me == 0) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_read, 1}, {}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&send_gradient, 1}, {}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
  } else if (me == 1) {
    const MessageBuffer again(Bytes(kBytes), options.device);
    const ReceiveBuffer receive_again = again.From(0);
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive_again, 1}));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {}, {&receive_gradient, 1}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    EXPECT_TRUE(again.Holds(Message(kBytes, 0, 1, 1)));
  }
  return absl::OkStatus();
}

absl::Status CheckSelfSend(Communicator& comm, const CheckOptions& options) {
  comm.ResetStats();
  const Bytes a = Message(1000, 1, 1, 1), b = Message(2000, 1, 1, 2);
  const MessageBuffer from_a(a, options.device), from_b(b, options.device);
  const MessageBuffer first(1000, options.device), second(2000, options.device);
  const SendBuffer sends[] = {from_a.To(comm.rank()), from_b.To(comm.rank())};
  const ReceiveBuffer receives[] = {first.From(comm.rank()), second.From(comm.rank())};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, sends, receives));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(first.Holds(a));
  EXPECT_TRUE(second.Holds(b));
  EXPECT_EQ(comm.stats().bytes_sent[0], 0) << "no other rank was sent anything";
  return absl::OkStatus();
}

absl::Status CheckRandomTraffic(Communicator& comm, const CheckOptions& options) {
  struct InFlight {
    std::deque<MessageBuffer> buffers;
    std::vector<std::pair<const MessageBuffer*, Bytes>> expected;
  };
  const int ranks = comm.world_size(), me = comm.rank();
  std::array<std::deque<InFlight>, kNumChannels> in_flight;
  for (int round = 0; round < 120; ++round) {
    const int c = Philox(1, round, 0)[0] % kNumChannels;
    InFlight& flight = in_flight[c].emplace_back();
    std::vector<SendBuffer> sends;
    std::vector<ReceiveBuffer> receives;
    for (int i = 0; i < 2 * ranks; ++i) {
      const PhiloxCounter random = Philox(2, round, i);
      const int from = random[0] % ranks, to = random[1] % ranks;
      const int64_t size = random[2] % (random[3] % 8 == 0 ? 100'000 : 100);
      const DeviceType device = random[3] % 16 < 4 ? DeviceType::kCpu : options.device;
      if (from == me) {
        sends.push_back(flight.buffers.emplace_back(Message(size, me, to, i), device).To(to));
      }
      if (to == me) {
        const MessageBuffer& block = flight.buffers.emplace_back(size, device);
        receives.push_back(block.From(from));
        flight.expected.emplace_back(&block, Message(size, from, me, i));
      }
    }
    BURST_RETURN_IF_ERROR(comm.Post(static_cast<Channel>(c), sends, receives));
    const int done = Philox(3, round, 0)[0] % (2 * kNumChannels);
    const bool last = round == 119;
    for (int channel = 0; channel < kNumChannels; ++channel) {
      if (channel != done && !last) continue;
      BURST_RETURN_IF_ERROR(comm.Wait(static_cast<Channel>(channel)));
      for (const InFlight& completed : in_flight[channel]) {
        for (const auto& [block, content] : completed.expected) {
          EXPECT_TRUE(block->Holds(content)) << "round " << round;
        }
      }
      in_flight[channel].clear();
    }
  }
  return absl::OkStatus();
}

}  // namespace burst
