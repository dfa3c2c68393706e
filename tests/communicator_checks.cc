#include "tests/communicator_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/types/span.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/device/memory.h"
#include "burst/tensor/tensor.h"
#include "tests/communicator_sum_checks.h"

namespace burst {
namespace {

using Bytes = std::vector<unsigned char>;

// Content that tells messages apart: every (source, destination, number) has its own.
Bytes Message(int64_t size, int source, int destination, int number) {
  Bytes bytes(size);
  const uint64_t key = (static_cast<uint64_t>(source) * 1000 + destination) * 1000 + number;
  for (int64_t i = 0; i < size; i += 16) {
    const PhiloxCounter random = Philox(key, 1, i / 16);
    std::memcpy(&bytes[i], random.data(), std::min<int64_t>(16, size - i));
  }
  return bytes;
}

// Bytes on a device, to be sent or received.
class Block {
 public:
  Block(int64_t size, DeviceType device) : memory_(AllocateMemory(device, size)), size_(size) {}
  Block(const Bytes& content, DeviceType device) : Block(content.size(), device) { Set(content); }
  ~Block() { FreeMemory(memory_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  void Set(const Bytes& content) {
    CopyMemory(memory_.data, memory_.device, content.data(), DeviceType::kCpu, size_);
  }
  bool Holds(const Bytes& content) const {
    Bytes bytes(size_);
    CopyMemory(bytes.data(), DeviceType::kCpu, memory_.data, memory_.device, size_);
    return bytes == content;
  }
  SendBuffer To(int peer) const { return {memory_.data, size_, peer, memory_.device}; }
  ReceiveBuffer From(int peer) const { return {memory_.data, size_, peer, memory_.device}; }

 private:
  const Allocation memory_;
  const int64_t size_;
};

int Next(const Communicator& comm) { return (comm.rank() + 1) % comm.world_size(); }
int Last(const Communicator& comm) {
  return (comm.rank() + comm.world_size() - 1) % comm.world_size();
}

// Every rank sends size(source, destination) bytes to every rank, itself among them, in one Post.
template <typename Size>
absl::Status ExchangeAll(Communicator& comm, DeviceType device, Channel channel, Size size) {
  const int ranks = comm.world_size(), me = comm.rank();
  std::deque<Block> sent, received;
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

absl::Status UnevenSizes(Communicator& comm, const CheckOptions& options) {
  return ExchangeAll(comm, options.device, Channel::kGradient,
                     [](int from, int to) { return 1 + 37 * from + 101 * to; });
}

absl::Status LargeMessages(Communicator& comm, const CheckOptions& options) {
  return ExchangeAll(comm, options.device, Channel::kRead,
                     [](int from, int to) { return (3 << 20) + 17 * from + to; });
}

// Some pairs exchange nothing: their messages are dropped on both sides.
absl::Status ZeroBytes(Communicator& comm, const CheckOptions& options) {
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

// A block travels the whole ring, double-buffered: at hop h a rank holds that of rank - h.
absl::Status Ring(Communicator& comm, const CheckOptions& options) {
  constexpr int64_t kBytes = 100'000;
  const int ranks = comm.world_size(), me = comm.rank();
  const Block a(Message(kBytes, me, 0, 7), options.device), b(kBytes, options.device);
  const Block *block = &a, *incoming = &b;
  for (int hop = 0; hop < ranks; ++hop) {
    const SendBuffer send = block->To(Next(comm));
    const ReceiveBuffer receive = incoming->From(Last(comm));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    EXPECT_TRUE(block->Holds(Message(kBytes, (me - hop + ranks) % ranks, 0, 7))) << "hop " << hop;
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    std::swap(block, incoming);
  }
  EXPECT_TRUE(block->Holds(Message(kBytes, me, 0, 7))) << "home again";
  return absl::OkStatus();
}

// Messages between two ranks arrive in the order posted, however they are spread over Posts. With
// `around` every rank sends all before it receives any, else the last one only receives.
absl::Status SendInOrder(Communicator& comm, DeviceType device, bool around) {
  constexpr int kMessages = 12;
  const auto size = [](int number) { return int64_t{1} << (2 * (number % 6)); };
  const int me = comm.rank(), next = Next(comm), last = Last(comm);
  std::deque<Block> sent, received;
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
    const ReceiveBuffer three[] = {received[i].From(last), received[i + 1].From(last),
                                   received[i + 2].From(last)};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, three));
  }
  if (!around && sends) BURST_RETURN_IF_ERROR(send_all());
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  for (int i = 0; receives && i < kMessages; ++i) {
    EXPECT_TRUE(received[i].Holds(Message(size(i), last, me, i))) << "message " << i;
  }
  return absl::OkStatus();
}

absl::Status Ordering(Communicator& comm, const CheckOptions& options) {
  if (!options.posts_in_turn) BURST_RETURN_IF_ERROR(SendInOrder(comm, options.device, true));
  return SendInOrder(comm, options.device, false);
}

// A receive that cannot complete yet on one channel holds up no other, and sends are received
// whichever channel their receiver waits on.
absl::Status Channels(Communicator& comm, const CheckOptions& options) {
  constexpr int64_t kBytes = 1 << 20;  // more than a transport would buffer
  const int ranks = comm.world_size(), me = comm.rank(), next = Next(comm), last = Last(comm);
  const Block read(Message(kBytes, me, next, 1), options.device);
  const Block gradient(Message(kBytes, me, next, 2), options.device);
  const Block read_in(Bytes(kBytes), options.device), gradient_in(Bytes(kBytes), options.device);
  const SendBuffer send_read = read.To(next), send_gradient = gradient.To(next);
  const ReceiveBuffer receive_read = read_in.From(last), receive_gradient = gradient_in.From(last);

  // Rank 0 takes part in the read when the gradient is through. (With posts_in_turn a rank's send
  // goes with its receive, elsewhere every rank's comes after.)
  const bool late = me == 0, alone = !options.posts_in_turn;
  const absl::Span<const SendBuffer> no_sends, read_sends(&send_read, 1);
  const absl::Span<const ReceiveBuffer> read_receives(&receive_read, 1);
  if (!late) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, alone ? no_sends : read_sends, read_receives));
  }
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&send_gradient, 1}, {&receive_gradient, 1}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
  EXPECT_TRUE(gradient_in.Holds(Message(kBytes, last, me, 2)));
  if (late) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, read_sends, read_receives));
  } else if (alone) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, read_sends, {}));
  }
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(read_in.Holds(Message(kBytes, last, me, 1)));

  // Rank 0 finishes its read before it starts the gradient that its receiver waits for first.
  if (ranks == 1) return absl::OkStatus();
  if (me == 0) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_read, 1}, {}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&send_gradient, 1}, {}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
  } else if (me == 1) {
    const Block again(Bytes(kBytes), options.device);
    const ReceiveBuffer receive_again = again.From(0);
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive_again, 1}));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {}, {&receive_gradient, 1}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    EXPECT_TRUE(again.Holds(Message(kBytes, 0, 1, 1)));
  }
  return absl::OkStatus();
}

absl::Status SelfSend(Communicator& comm, const CheckOptions& options) {
  comm.ResetStats();
  const Bytes a = Message(1000, 1, 1, 1), b = Message(2000, 1, 1, 2);
  const Block from_a(a, options.device), from_b(b, options.device);
  const Block first(1000, options.device), second(2000, options.device);
  const SendBuffer sends[] = {from_a.To(comm.rank()), from_b.To(comm.rank())};
  const ReceiveBuffer receives[] = {first.From(comm.rank()), second.From(comm.rank())};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, sends, receives));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(first.Holds(a));
  EXPECT_TRUE(second.Holds(b));
  EXPECT_EQ(comm.stats().bytes_sent[0], 0) << "no other rank was sent anything";
  return absl::OkStatus();
}

// Random traffic, the same plan on every rank: any number of messages of any size between any pair
// on any channel, several rounds in flight; on a GPU some of host memory among them.
absl::Status RandomTraffic(Communicator& comm, const CheckOptions& options) {
  struct InFlight {
    std::deque<Block> buffers;
    std::vector<std::pair<const Block*, Bytes>> expected;
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
        const Block& block = flight.buffers.emplace_back(size, device);
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

// What goes before a Post, after a Wait and between them takes place in that order, though nothing
// waits for a GPU until the end: a rank's tensor counts up while copies of it travel.
absl::Status StreamOrder(Communicator& comm, const CheckOptions& options) {
  constexpr int64_t kElements = 1 << 20;
  constexpr int kRounds = 20;
  const int ranks = comm.world_size();
  const Tensor count = Tensor::Zeros({kElements}, DType::kFloat32, options.device);
  const Tensor incoming = Tensor::ZerosLike(count), sum = Tensor::ZerosLike(count);
  for (int round = 1; round <= kRounds; ++round) {
    count.Fill(round);
    const SendBuffer send = {count.raw_data(), count.size_bytes(), Next(comm), options.device};
    const ReceiveBuffer receive = {incoming.raw_data(), incoming.size_bytes(), Last(comm),
                                   options.device};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    sum.Add(incoming);
    incoming.Fill(-1);
    BURST_RETURN_IF_ERROR(comm.AllReduceSum(count));
    sum.Add(count);
  }
  const float expected = (1 + ranks) * kRounds * (kRounds + 1) / 2;
  const std::vector<float> values = sum.ToVector<float>();
  EXPECT_EQ(std::count(values.begin(), values.end(), expected), kElements);
  return absl::OkStatus();
}

// Sums posted one after the other, while messages travel on another channel.
absl::Status PostedAllReduce(Communicator& comm, const CheckOptions& options) {
  const int ranks = comm.world_size();
  std::vector<Tensor> sums;
  for (int64_t n : {1000, 1, 200'000, 0, 77}) {
    sums.push_back(SumInputs<float>(comm.rank(), n, options.device));
  }
  for (const Tensor& sum : sums) BURST_RETURN_IF_ERROR(comm.PostAllReduceSum(sum));
  BURST_RETURN_IF_ERROR(Ring(comm, options));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kCollective));
  for (const Tensor& sum : sums) CheckSum<float>(sum, ranks, options.fixed_order);
  return absl::OkStatus();
}

absl::Status Broadcast(Communicator& comm, const CheckOptions& options) {
  for (int root = 0; root < comm.world_size(); ++root) {
    for (int64_t size : {0, 1, 1000, (1 << 20) + 1}) {
      SCOPED_TRACE(testing::Message() << size << " from root " << root);
      Bytes data = comm.rank() == root ? Message(size, root, 0, 3) : Bytes(size);
      BURST_RETURN_IF_ERROR(comm.Broadcast(data.data(), size, root));
      EXPECT_TRUE(data == Message(size, root, 0, 3));

      const Tensor tensor = Tensor::Zeros({size}, DType::kFloat32, options.device);
      tensor.Fill(comm.rank());
      BURST_RETURN_IF_ERROR(comm.Broadcast(tensor, root));
      EXPECT_EQ(tensor.ToVector<float>(), std::vector<float>(size, root));
    }
  }
  return absl::OkStatus();
}

absl::Status AllGather(Communicator& comm, const CheckOptions&) {
  for (int round = 0; round < 3; ++round) {
    BURST_ASSIGN_OR_RETURN(const std::vector<double> values,
                           comm.AllGather(comm.rank() + 0.1 * round));
    EXPECT_EQ(static_cast<int>(values.size()), comm.world_size());
    for (int r = 0; r < comm.world_size(); ++r) EXPECT_EQ(values[r], r + 0.1 * round);
  }
  return absl::OkStatus();
}

// Nobody leaves a barrier before the last has come, by the clock that all ranks of one host share.
absl::Status Barrier(Communicator& comm, const CheckOptions&) {
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  for (int late = 0; late < comm.world_size(); ++late) {
    if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const double arrived = now();
    BURST_RETURN_IF_ERROR(comm.Barrier());
    const double left = now();
    BURST_ASSIGN_OR_RETURN(const std::vector<double> arrivals, comm.AllGather(arrived));
    for (double other : arrivals) EXPECT_GE(left, other);
  }
  return absl::OkStatus();
}

// The group has the expected size, this rank the expected place, and it carries messages.
absl::Status CheckGroup(Communicator& group, const CheckOptions& options, int size, int rank) {
  EXPECT_EQ(group.world_size(), size);
  EXPECT_EQ(group.rank(), rank);
  BURST_RETURN_IF_ERROR(Ring(group, options));
  const Tensor tensor = SumInputs<float>(group.rank(), 1000, options.device);
  BURST_RETURN_IF_ERROR(group.AllReduceSum(tensor));
  CheckSum<float>(tensor, group.world_size(), options.fixed_order);
  return absl::OkStatus();
}

absl::Status Split(Communicator& comm, const CheckOptions& options) {
  const int ranks = comm.world_size(), me = comm.rank();
  const int color = me % 2, mates = (ranks + 1 - color) / 2;
  BURST_ASSIGN_OR_RETURN(const auto parity, comm.Split(color, 0));
  BURST_RETURN_IF_ERROR(CheckGroup(*parity, options, mates, me / 2));

  BURST_ASSIGN_OR_RETURN(const auto reversed, comm.Split(0, -me));
  BURST_RETURN_IF_ERROR(CheckGroup(*reversed, options, ranks, ranks - 1 - me));

  // Without rank 0, while the groups above live.
  BURST_ASSIGN_OR_RETURN(const auto others, comm.Split(me == 0 ? -1 : 5, me));
  EXPECT_EQ(others == nullptr, me == 0);
  if (others != nullptr) {
    BURST_RETURN_IF_ERROR(CheckGroup(*others, options, ranks - 1, me - 1));
  }

  // Each alone, from a group that was split itself.
  BURST_ASSIGN_OR_RETURN(const auto alone, parity->Split(parity->rank(), 0));
  BURST_RETURN_IF_ERROR(CheckGroup(*alone, options, 1, 0));
  return CheckGroup(comm, options, ranks, me);
}

// Messages of a group and of the world it was split from do not meet: the last rank's in the world
// come after all those of the group.
absl::Status SplitIsIndependent(Communicator& comm, const CheckOptions& options) {
  const int me = comm.rank(), next = Next(comm), last = Last(comm);
  BURST_ASSIGN_OR_RETURN(const auto twin, comm.Split(0, me));
  const Block a(Message(5000, me, next, 1), options.device);
  const Block b(Message(5000, me, next, 2), options.device);
  const Block a_in(5000, options.device), b_in(5000, options.device);
  const SendBuffer send_a = a.To(next), send_b = b.To(next);
  const ReceiveBuffer receive_a = a_in.From(last), receive_b = b_in.From(last);
  const bool late = next == 0;
  if (!late) BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_a, 1}, {&receive_a, 1}));
  BURST_RETURN_IF_ERROR(twin->Post(Channel::kRead, {&send_b, 1}, {&receive_b, 1}));
  BURST_RETURN_IF_ERROR(twin->Wait(Channel::kRead));
  EXPECT_TRUE(b_in.Holds(Message(5000, last, me, 2)));
  if (late) BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_a, 1}, {&receive_a, 1}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(a_in.Holds(Message(5000, last, me, 1)));
  return absl::OkStatus();
}

// What Stats says was sent on the collective channel since the last call, by all ranks.
absl::StatusOr<int64_t> TotalSent(Communicator& comm) {
  const double mine = comm.stats().bytes_sent[static_cast<int>(Channel::kCollective)];
  BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm.AllGather(mine));
  comm.ResetStats();
  return static_cast<int64_t>(std::accumulate(all.begin(), all.end(), 0.0));
}

absl::Status Counters(Communicator& comm, const CheckOptions& options) {
  constexpr int kCollective = static_cast<int>(Channel::kCollective);
  const int64_t ranks = comm.world_size();
  comm.ResetStats();

  const Tensor even = SumInputs<float>(comm.rank(), 1000 * ranks, options.device);
  BURST_RETURN_IF_ERROR(comm.AllReduceSum(even));
  EXPECT_EQ(comm.stats().bytes_sent[kCollective], 2 * (ranks - 1) * even.size_bytes() / ranks);
  EXPECT_EQ(comm.stats().messages_sent[kCollective], 2 * (ranks - 1));
  comm.ResetStats();

  const Tensor uneven = SumInputs<double>(comm.rank(), 1000 * ranks + ranks / 2, options.device);
  BURST_RETURN_IF_ERROR(comm.AllReduceSum(uneven));
  BURST_ASSIGN_OR_RETURN(int64_t total, TotalSent(comm));
  EXPECT_EQ(total, 2 * (ranks - 1) * uneven.size_bytes());

  BURST_RETURN_IF_ERROR(comm.Broadcast(uneven, 0));
  BURST_ASSIGN_OR_RETURN(total, TotalSent(comm));
  EXPECT_EQ(total, (ranks - 1) * uneven.size_bytes());

  BURST_RETURN_IF_ERROR(comm.AllGather(1).status());
  EXPECT_EQ(comm.stats().bytes_sent[kCollective], (ranks - 1) * 8);
  comm.ResetStats();

  // Each channel counts for itself.
  BURST_RETURN_IF_ERROR(Ring(comm, options));
  const int64_t hops = ranks == 1 ? 0 : ranks;
  EXPECT_EQ(comm.stats().bytes_sent, (std::array<int64_t, 3>{hops * 100'000, 0, 0}));
  EXPECT_EQ(comm.stats().messages_sent, (std::array<int64_t, 3>{hops, 0, 0}));
  return absl::OkStatus();
}

// Refused on the spot, and the communicator stays usable.
absl::Status BadArguments(Communicator& comm, const CheckOptions& options) {
  char byte = 0;
  const auto code = [&](Channel channel, const void* data, int64_t bytes, int peer) {
    const SendBuffer send = {data, bytes, peer, options.device};
    const ReceiveBuffer receive = {const_cast<void*>(data), bytes, peer, options.device};
    const absl::Status sent = comm.Post(channel, {&send, 1}, {});
    EXPECT_EQ(comm.Post(channel, {}, {&receive, 1}).code(), sent.code());
    return sent.code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(code(Channel::kRead, &byte, 1, -1), kInvalid);
  EXPECT_EQ(code(Channel::kRead, &byte, 1, comm.world_size()), kInvalid);
  EXPECT_EQ(code(Channel::kRead, &byte, -1, 0), kInvalid);
  EXPECT_EQ(code(Channel::kRead, nullptr, 1, 0), kInvalid);
  EXPECT_EQ(code(static_cast<Channel>(kNumChannels), &byte, 1, 0), kInvalid);
  EXPECT_EQ(code(static_cast<Channel>(-1), &byte, 1, 0), kInvalid);
  EXPECT_EQ(comm.Broadcast(&byte, 1, comm.world_size()).code(), kInvalid);
  EXPECT_EQ(comm.Broadcast(&byte, 1, -1).code(), kInvalid);
  return Ring(comm, options);
}

}  // namespace

const std::vector<CommunicatorCheck>& CommunicatorChecks() {
  static const auto* const checks = new std::vector<CommunicatorCheck>{
      {"Ring", Ring},
      {"Ordering", Ordering},
      {"Channels", Channels},
      {"UnevenSizes", UnevenSizes},
      {"LargeMessages", LargeMessages},
      {"ZeroBytes", ZeroBytes},
      {"SelfSend", SelfSend},
      {"RandomTraffic", RandomTraffic},
      {"StreamOrder", StreamOrder},
      {"AllReduce", CheckAllReduce},
      {"AllReduceInPieces", CheckAllReduceInPieces},
      {"PostedAllReduce", PostedAllReduce},
      {"Broadcast", Broadcast},
      {"AllGather", AllGather},
      {"Barrier", Barrier},
      {"Split", Split},
      {"SplitIsIndependent", SplitIsIndependent},
      {"Counters", Counters},
      {"BadArguments", BadArguments},
  };
  return *checks;
}

}  // namespace burst
