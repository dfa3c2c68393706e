#include "tests/communicator_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include "absl/types/span.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/tensor/tensor.h"

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

SendBuffer To(int peer, const Bytes& bytes) {
  return {bytes.data(), static_cast<int64_t>(bytes.size()), peer};
}
ReceiveBuffer From(int peer, Bytes& bytes) {
  return {bytes.data(), static_cast<int64_t>(bytes.size()), peer};
}

// Every rank sends size(source, destination) bytes to every rank, itself among them, in one Post.
template <typename Size>
absl::Status ExchangeAll(Communicator& comm, Channel channel, Size size) {
  const int ranks = comm.world_size(), me = comm.rank();
  std::vector<Bytes> sent(ranks), received(ranks);
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int peer = 0; peer < ranks; ++peer) {
    sent[peer] = Message(size(me, peer), me, peer, 0);
    received[peer].resize(size(peer, me));
    sends.push_back(To(peer, sent[peer]));
    receives.push_back(From(peer, received[peer]));
  }
  BURST_RETURN_IF_ERROR(comm.Post(channel, sends, receives));
  BURST_RETURN_IF_ERROR(comm.Wait(channel));
  for (int peer = 0; peer < ranks; ++peer) {
    EXPECT_TRUE(received[peer] == Message(size(peer, me), peer, me, 0)) << "from rank " << peer;
  }
  return absl::OkStatus();
}

absl::Status UnevenSizes(Communicator& comm) {
  return ExchangeAll(comm, Channel::kGradient,
                     [](int from, int to) { return 1 + 37 * from + 101 * to; });
}

absl::Status LargeMessages(Communicator& comm) {
  return ExchangeAll(comm, Channel::kRead,
                     [](int from, int to) { return (3 << 20) + 17 * from + to; });
}

// Some pairs exchange nothing: their messages are dropped on both sides.
absl::Status ZeroBytes(Communicator& comm) {
  comm.ResetStats();
  BURST_RETURN_IF_ERROR(ExchangeAll(
      comm, Channel::kRead, [](int from, int to) { return (from + to) % 2 == 0 ? 0 : 64; }));
  int peers = 0;
  for (int peer = 0; peer < comm.world_size(); ++peer) peers += (comm.rank() + peer) % 2;
  EXPECT_EQ(comm.stats().messages_sent[0], peers);
  EXPECT_EQ(comm.stats().bytes_sent[0], 64 * peers);
  const SendBuffer send = {nullptr, 0, 0};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {}));  // nobody receives it
  return comm.Wait(Channel::kRead);
}

// A block travels the whole ring, double-buffered: at hop h a rank holds that of rank - h.
absl::Status Ring(Communicator& comm) {
  constexpr int64_t kBytes = 100'000;
  const int ranks = comm.world_size(), me = comm.rank();
  const int next = (me + 1) % ranks, last = (me + ranks - 1) % ranks;
  Bytes block = Message(kBytes, me, 0, 7), incoming(kBytes);
  for (int hop = 0; hop < ranks; ++hop) {
    const SendBuffer send = To(next, block);
    const ReceiveBuffer receive = From(last, incoming);
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    EXPECT_TRUE(block == Message(kBytes, (me - hop + ranks) % ranks, 0, 7)) << "hop " << hop;
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    std::swap(block, incoming);
  }
  EXPECT_TRUE(block == Message(kBytes, me, 0, 7)) << "home again";
  return absl::OkStatus();
}

// Messages between two ranks arrive in the order posted, however they are spread over Posts.
absl::Status Ordering(Communicator& comm) {
  constexpr int kMessages = 12;
  const auto size = [](int number) { return int64_t{1} << (2 * (number % 6)); };
  const int ranks = comm.world_size(), me = comm.rank();
  const int next = (me + 1) % ranks, last = (me + ranks - 1) % ranks;
  std::vector<Bytes> sent(kMessages), received(kMessages);
  for (int i = 0; i < kMessages; ++i) {
    sent[i] = Message(size(i), me, next, i);
    received[i].resize(size(i));
  }
  for (int i = 0; i < kMessages; ++i) {
    const SendBuffer send = To(next, sent[i]);
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {}));
  }
  for (int i = 0; i < kMessages; i += 3) {
    const ReceiveBuffer receives[] = {From(last, received[i]), From(last, received[i + 1]),
                                      From(last, received[i + 2])};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, receives));
  }
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  for (int i = 0; i < kMessages; ++i) {
    EXPECT_TRUE(received[i] == Message(size(i), last, me, i)) << "message " << i;
  }
  return absl::OkStatus();
}

// A receive that cannot complete yet on one channel holds up no other, and sends are received
// whichever channel their receiver waits on.
absl::Status Channels(Communicator& comm) {
  constexpr int64_t kBytes = 1 << 20;  // more than a transport would buffer
  const int ranks = comm.world_size(), me = comm.rank();
  const int next = (me + 1) % ranks, last = (me + ranks - 1) % ranks;
  const Bytes read = Message(kBytes, me, next, 1), gradient = Message(kBytes, me, next, 2);
  Bytes read_in(kBytes), gradient_in(kBytes);
  const SendBuffer send_read = To(next, read), send_gradient = To(next, gradient);
  const ReceiveBuffer receive_read = From(last, read_in),
                      receive_gradient = From(last, gradient_in);

  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive_read, 1}));
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&send_gradient, 1}, {&receive_gradient, 1}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
  EXPECT_TRUE(gradient_in == Message(kBytes, last, me, 2));
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_read, 1}, {}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(read_in == Message(kBytes, last, me, 1));

  // Rank 0 finishes its read before it starts the gradient that its receiver waits for first.
  if (ranks == 1) return absl::OkStatus();
  if (me == 0) {
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_read, 1}, {}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&send_gradient, 1}, {}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
  } else if (me == 1) {
    read_in.assign(kBytes, 0);
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive_read, 1}));
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {}, {&receive_gradient, 1}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    EXPECT_TRUE(read_in == Message(kBytes, 0, 1, 1));
  }
  return absl::OkStatus();
}

absl::Status SelfSend(Communicator& comm) {
  comm.ResetStats();
  const Bytes a = Message(1000, 1, 1, 1), b = Message(2000, 1, 1, 2);
  Bytes first(1000), second(2000);
  const SendBuffer sends[] = {To(comm.rank(), a), To(comm.rank(), b)};
  const ReceiveBuffer receives[] = {From(comm.rank(), first), From(comm.rank(), second)};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, sends, receives));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(first == a);
  EXPECT_TRUE(second == b);
  EXPECT_EQ(comm.stats().bytes_sent[0], 0) << "no other rank was sent anything";
  return absl::OkStatus();
}

// Random traffic, the same plan on every rank: any number of messages of any size between any pair
// on any channel, several rounds in flight.
absl::Status RandomTraffic(Communicator& comm) {
  struct InFlight {
    std::vector<Bytes> buffers;
    std::vector<std::pair<size_t, Bytes>> expected;  // index of the buffer, its content
  };
  const int ranks = comm.world_size(), me = comm.rank();
  std::vector<std::vector<InFlight>> in_flight(kNumChannels);
  for (int round = 0; round < 120; ++round) {
    const int c = Philox(1, round, 0)[0] % kNumChannels;
    InFlight& flight = in_flight[c].emplace_back();
    flight.buffers.reserve(4 * ranks * ranks);
    std::vector<SendBuffer> sends;
    std::vector<ReceiveBuffer> receives;
    for (int i = 0; i < 2 * ranks; ++i) {
      const PhiloxCounter random = Philox(2, round, i);
      const int from = random[0] % ranks, to = random[1] % ranks;
      const int64_t size = random[2] % (random[3] % 8 == 0 ? 100'000 : 100);
      if (from == me)
        sends.push_back(To(to, flight.buffers.emplace_back(Message(size, me, to, i))));
      if (to == me) {
        receives.push_back(From(from, flight.buffers.emplace_back(size)));
        flight.expected.emplace_back(flight.buffers.size() - 1, Message(size, from, me, i));
      }
    }
    BURST_RETURN_IF_ERROR(comm.Post(static_cast<Channel>(c), sends, receives));
    const int done = Philox(3, round, 0)[0] % (2 * kNumChannels);
    const bool last = round == 119;
    for (int channel = 0; channel < kNumChannels; ++channel) {
      if (channel != done && !last) continue;
      BURST_RETURN_IF_ERROR(comm.Wait(static_cast<Channel>(channel)));
      for (const InFlight& completed : in_flight[channel]) {
        for (const auto& [index, content] : completed.expected) {
          EXPECT_TRUE(completed.buffers[index] == content) << "round " << round;
        }
      }
      in_flight[channel].clear();
    }
  }
  return absl::OkStatus();
}

// Element i of the input of a rank: of both signs and of very different magnitudes, so that the
// order of summation shows in the last bits.
template <typename T>
T Input(int rank, int64_t i) {
  const PhiloxCounter random = Philox(4, rank, i);
  return static_cast<T>(std::ldexp(UniformFromBits(random[0]) - 0.5, random[1] % 20));
}

template <typename T>
Tensor Inputs(int rank, int64_t n) {
  Tensor tensor = Tensor::Empty({n}, DTypeOf<T>::value);
  for (int64_t i = 0; i < n; ++i) tensor.data<T>()[i] = Input<T>(rank, i);
  return tensor;
}

// Against long double within the bound of n - 1 roundings, and to the bit against the order of
// summation that the header promises: so all ranks and all transports agree.
template <typename T>
void CheckSum(const Tensor& sum, int ranks, int64_t stride = 1) {
  const int64_t n = sum.numel();
  const T* y = sum.data<T>();
  const long double unit = std::numeric_limits<T>::epsilon() / 2;
  int64_t wrong = 0, not_in_order = 0;
  for (int s = 0; s < ranks; ++s) {
    for (int64_t i = n * s / ranks; i < n * (s + 1) / ranks; i += stride) {
      long double exact = 0, magnitude = 0;
      T in_order = Input<T>(s, i);
      for (int r = 0; r < ranks; ++r) {
        exact += Input<T>(r, i);
        magnitude += std::abs(Input<T>(r, i));
        if (r > 0) in_order += Input<T>((s + r) % ranks, i);
      }
      const long double u = (ranks - 1) * unit;
      wrong += !(std::abs(y[i] - exact) <= u / (1 - u) * magnitude);
      not_in_order += !(y[i] == in_order);
    }
  }
  EXPECT_EQ(wrong, 0) << "of " << n;
  EXPECT_EQ(not_in_order, 0) << "of " << n;
}

absl::Status AllReduce(Communicator& comm) {
  const int ranks = comm.world_size();
  for (int64_t n : {0, 1, 2, 3, ranks - 1, ranks, ranks + 1, 1000, 54321}) {
    for (bool generic : {false, true}) {  // what an implementation overrides, and the base's
      const auto reduce = [&](const Tensor& tensor) {
        return generic ? comm.Communicator::AllReduceSum(tensor) : comm.AllReduceSum(tensor);
      };
      SCOPED_TRACE(testing::Message() << n << " elements, generic " << generic);
      const Tensor floats = Inputs<float>(comm.rank(), n);
      BURST_RETURN_IF_ERROR(reduce(floats));
      CheckSum<float>(floats, ranks);
      const Tensor doubles = Inputs<double>(comm.rank(), n).View({1, n, 1});
      BURST_RETURN_IF_ERROR(reduce(doubles));
      CheckSum<double>(doubles, ranks);
    }
  }
  return absl::OkStatus();
}

// Segments of more than one piece, the last one short.
absl::Status AllReduceInPieces(Communicator& comm) {
  const int64_t n = comm.world_size() * (int64_t{1} << 19) + 12'345;
  const Tensor generic = Inputs<float>(comm.rank(), n), own = generic.Clone();
  comm.ResetStats();
  BURST_RETURN_IF_ERROR(comm.Communicator::AllReduceSum(generic));
  const CommStats counted = comm.stats();
  comm.ResetStats();
  BURST_RETURN_IF_ERROR(comm.AllReduceSum(own));
  EXPECT_EQ(comm.stats().bytes_sent, counted.bytes_sent);
  EXPECT_EQ(comm.stats().messages_sent, counted.messages_sent);
  CheckSum<float>(generic, comm.world_size(), /*stride=*/37);
  EXPECT_EQ(std::memcmp(own.raw_data(), generic.raw_data(), own.size_bytes()), 0);
  return absl::OkStatus();
}

absl::Status Broadcast(Communicator& comm) {
  for (int root = 0; root < comm.world_size(); ++root) {
    for (int64_t size : {0, 1, 1000, (1 << 20) + 1}) {
      Bytes data = comm.rank() == root ? Message(size, root, 0, 3) : Bytes(size);
      BURST_RETURN_IF_ERROR(comm.Broadcast(data.data(), size, root));
      EXPECT_TRUE(data == Message(size, root, 0, 3)) << size << " bytes from root " << root;
    }
  }
  return absl::OkStatus();
}

absl::Status AllGather(Communicator& comm) {
  for (int round = 0; round < 3; ++round) {
    BURST_ASSIGN_OR_RETURN(const std::vector<double> values,
                           comm.AllGather(comm.rank() + 0.1 * round));
    EXPECT_EQ(static_cast<int>(values.size()), comm.world_size());
    for (int r = 0; r < comm.world_size(); ++r) EXPECT_EQ(values[r], r + 0.1 * round);
  }
  return absl::OkStatus();
}

// Nobody leaves a barrier before the last has come, by the clock that all ranks of one host share.
absl::Status Barrier(Communicator& comm) {
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
absl::Status CheckGroup(Communicator& group, int size, int rank) {
  EXPECT_EQ(group.world_size(), size);
  EXPECT_EQ(group.rank(), rank);
  BURST_RETURN_IF_ERROR(Ring(group));
  const Tensor tensor = Inputs<float>(group.rank(), 1000);
  BURST_RETURN_IF_ERROR(group.AllReduceSum(tensor));
  CheckSum<float>(tensor, group.world_size());
  return absl::OkStatus();
}

absl::Status Split(Communicator& comm) {
  const int ranks = comm.world_size(), me = comm.rank();
  const int color = me % 2, mates = (ranks + 1 - color) / 2;
  BURST_ASSIGN_OR_RETURN(const auto parity, comm.Split(color, 0));
  BURST_RETURN_IF_ERROR(CheckGroup(*parity, mates, me / 2));

  BURST_ASSIGN_OR_RETURN(const auto reversed, comm.Split(0, -me));
  BURST_RETURN_IF_ERROR(CheckGroup(*reversed, ranks, ranks - 1 - me));

  // Without rank 0, while the groups above live.
  BURST_ASSIGN_OR_RETURN(const auto others, comm.Split(me == 0 ? -1 : 5, me));
  EXPECT_EQ(others == nullptr, me == 0);
  if (others != nullptr) BURST_RETURN_IF_ERROR(CheckGroup(*others, ranks - 1, me - 1));

  // Each alone, from a group that was split itself.
  BURST_ASSIGN_OR_RETURN(const auto alone, parity->Split(parity->rank(), 0));
  BURST_RETURN_IF_ERROR(CheckGroup(*alone, 1, 0));
  return CheckGroup(comm, ranks, me);
}

// Messages of a group and of the world it was split from do not meet.
absl::Status SplitIsIndependent(Communicator& comm) {
  const int ranks = comm.world_size(), me = comm.rank();
  const int next = (me + 1) % ranks, last = (me + ranks - 1) % ranks;
  BURST_ASSIGN_OR_RETURN(const auto twin, comm.Split(0, me));
  const Bytes a = Message(5000, me, next, 1), b = Message(5000, me, next, 2);
  Bytes a_in(5000), b_in(5000);
  const SendBuffer send_a = To(next, a), send_b = To(next, b);
  const ReceiveBuffer receive_a = From(last, a_in), receive_b = From(last, b_in);
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_a, 1}, {}));
  BURST_RETURN_IF_ERROR(twin->Post(Channel::kRead, {&send_b, 1}, {&receive_b, 1}));
  BURST_RETURN_IF_ERROR(twin->Wait(Channel::kRead));
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive_a, 1}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(a_in == Message(5000, last, me, 1));
  EXPECT_TRUE(b_in == Message(5000, last, me, 2));
  return absl::OkStatus();
}

// What Stats says was sent on the collective channel since the last call, by all ranks.
absl::StatusOr<int64_t> TotalSent(Communicator& comm) {
  const double mine = comm.stats().bytes_sent[static_cast<int>(Channel::kCollective)];
  BURST_ASSIGN_OR_RETURN(const std::vector<double> all, comm.AllGather(mine));
  comm.ResetStats();
  return static_cast<int64_t>(std::accumulate(all.begin(), all.end(), 0.0));
}

absl::Status Counters(Communicator& comm) {
  constexpr int kCollective = static_cast<int>(Channel::kCollective);
  const int64_t ranks = comm.world_size();
  comm.ResetStats();

  const Tensor even = Inputs<float>(comm.rank(), 1000 * ranks);
  BURST_RETURN_IF_ERROR(comm.AllReduceSum(even));
  EXPECT_EQ(comm.stats().bytes_sent[kCollective], 2 * (ranks - 1) * even.size_bytes() / ranks);
  EXPECT_EQ(comm.stats().messages_sent[kCollective], 2 * (ranks - 1));
  comm.ResetStats();

  const Tensor uneven = Inputs<double>(comm.rank(), 1000 * ranks + ranks / 2);
  BURST_RETURN_IF_ERROR(comm.AllReduceSum(uneven));
  BURST_ASSIGN_OR_RETURN(int64_t total, TotalSent(comm));
  EXPECT_EQ(total, 2 * (ranks - 1) * uneven.size_bytes());

  BURST_RETURN_IF_ERROR(comm.Broadcast(uneven.raw_data(), uneven.size_bytes(), 0));
  BURST_ASSIGN_OR_RETURN(total, TotalSent(comm));
  EXPECT_EQ(total, (ranks - 1) * uneven.size_bytes());

  BURST_RETURN_IF_ERROR(comm.AllGather(1).status());
  EXPECT_EQ(comm.stats().bytes_sent[kCollective], (ranks - 1) * 8);
  comm.ResetStats();

  // Each channel counts for itself.
  BURST_RETURN_IF_ERROR(Ring(comm));
  const int64_t hops = ranks == 1 ? 0 : ranks;
  EXPECT_EQ(comm.stats().bytes_sent, (std::array<int64_t, 3>{hops * 100'000, 0, 0}));
  EXPECT_EQ(comm.stats().messages_sent, (std::array<int64_t, 3>{hops, 0, 0}));
  return absl::OkStatus();
}

// Refused on the spot, and the communicator stays usable.
absl::Status BadArguments(Communicator& comm) {
  char byte = 0;
  const auto code = [&](Channel channel, const void* data, int64_t bytes, int peer) {
    const SendBuffer send = {data, bytes, peer};
    const ReceiveBuffer receive = {const_cast<void*>(data), bytes, peer};
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
  return Ring(comm);
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
      {"AllReduce", AllReduce},
      {"AllReduceInPieces", AllReduceInPieces},
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

// FNV-1a over the results of all sizes.
absl::StatusOr<uint64_t> AllReduceDigest(Communicator& comm) {
  uint64_t digest = 0xcbf29ce484222325;
  for (int64_t n : {1, 5, 1001, 77'777}) {
    const Tensor floats = Inputs<float>(comm.rank(), n), doubles = Inputs<double>(comm.rank(), n);
    for (const Tensor& tensor : {floats, doubles}) {
      BURST_RETURN_IF_ERROR(comm.AllReduceSum(tensor));
      const auto* bytes = static_cast<const unsigned char*>(tensor.raw_data());
      for (int64_t i = 0; i < tensor.size_bytes(); ++i) {
        digest = (digest ^ bytes[i]) * 0x100000001b3;
      }
    }
  }
  return digest;
}

}  // namespace burst
