#include "tests/comm/communicator_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <thread>

#include "burst/base/status.h"
#include "burst/comm/message_time.h"
#include "burst/tensor/tensor.h"
#include "tests/comm/communicator_message_checks.h"
#include "tests/comm/communicator_reduction_checks.h"

namespace burst {
namespace {

// Work before a Post, after a Wait and between them takes place in that order, though nothing waits
// for a GPU until the end. A rank's tensor counts up while copies of it travel.
absl::Status StreamOrder(Communicator& comm, const CheckOptions& options) {
  constexpr int64_t kElements = 1 << 20;
  constexpr int kRounds = 20;
  const int ranks = comm.world_size();
  const Tensor count = Tensor::Zeros({kElements}, DType::kFloat32, options.device);
  const Tensor incoming = Tensor::ZerosLike(count), sum = Tensor::ZerosLike(count);
  for (int round = 1; round <= kRounds; ++round) {
    count.Fill(round);
    const SendBuffer send = {count.raw_data(), count.size_bytes(), Next(comm), options.device};
    const ReceiveBuffer receive = {incoming.raw_data(), incoming.size_bytes(), Previous(comm),
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

// All-reduces posted one after the other, while messages are sent on another channel.
absl::Status PostedAllReduce(Communicator& comm, const CheckOptions& options) {
  const int ranks = comm.world_size();
  std::vector<Tensor> sums;
  for (int64_t n : {1000, 1, 200'000, 0, 77}) {
    sums.push_back(SumInputs<float>(comm.rank(), n, options.device));
  }
  for (const Tensor& sum : sums) BURST_RETURN_IF_ERROR(comm.PostAllReduceSum(sum));
  BURST_RETURN_IF_ERROR(CheckRing(comm, options));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kCollective));
  for (const Tensor& sum : sums) CheckSum<float>(sum, ranks, options.fixed_order);
  return absl::OkStatus();
}

// Divides a tensor among the ranks, in equal and unequal parts. It is gathered from a separate part
// and in place, and reduced.
absl::Status Parts(Communicator& comm, const CheckOptions& options) {
  const int ranks = comm.world_size();
  for (const bool equal : {true, false}) {
    std::vector<int64_t> counts, begins;
    int64_t n = 0;
    for (int r = 0; r < ranks; ++r) {
      counts.push_back(equal ? 192 : 100 + 33 * r);
      begins.push_back(n);
      n += counts.back();
    }
    const int64_t begin = begins[comm.rank()], count = counts[comm.rank()];
    std::vector<float> expected;  // the part of rank r, from its inputs
    for (int r = 0; r < ranks; ++r) {
      const auto part = SumInputs<float>(r, counts[r], DeviceType::kCpu).ToVector<float>();
      expected.insert(expected.end(), part.begin(), part.end());
    }
    const Tensor own = SumInputs<float>(comm.rank(), count, options.device);
    for (const bool in_place : {true, false}) {
      const Tensor all = Tensor::Zeros({n}, DType::kFloat32, options.device);
      const Tensor part = all.Slice(0, begin, count);
      if (in_place) part.CopyFrom(own);
      BURST_RETURN_IF_ERROR(comm.PostAllGatherParts(in_place ? part : own, counts, all));
      BURST_RETURN_IF_ERROR(comm.Wait(Channel::kCollective));
      EXPECT_EQ(all.ToVector<float>(), expected) << equal << in_place;
    }
    // Whole numbers, whose sums are exact in any order.
    const Tensor all = Tensor::Empty({n}, DType::kFloat32);
    for (int64_t i = 0; i < n; ++i)
      all.data<float>()[i] = static_cast<float>(i * (comm.rank() + 1));
    const Tensor sum = Tensor::Zeros({count}, DType::kFloat32, options.device);
    BURST_RETURN_IF_ERROR(comm.PostReduceScatterSum(all.To(options.device), counts, sum));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kCollective));
    std::vector<float> sums;
    for (int64_t i = begin; i < begin + count; ++i) {
      sums.push_back(static_cast<float>(i * (ranks * (ranks + 1) / 2)));
    }
    EXPECT_EQ(sum.ToVector<float>(), sums) << equal;
  }
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

// Nobody leaves a barrier before the last rank has come, by the clock of the host that all ranks
// share.
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

// Checks that the group has the expected size, that this rank has the expected place, and that
// messages arrive.
absl::Status CheckGroup(Communicator& group, const CheckOptions& options, int size, int rank) {
  EXPECT_EQ(group.world_size(), size);
  EXPECT_EQ(group.rank(), rank);
  BURST_RETURN_IF_ERROR(CheckRing(group, options));
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

  // This group leaves out rank 0, while the groups above live.
  BURST_ASSIGN_OR_RETURN(const auto others, comm.Split(me == 0 ? -1 : 5, me));
  EXPECT_EQ(others == nullptr, me == 0);
  if (others != nullptr) {
    BURST_RETURN_IF_ERROR(CheckGroup(*others, options, ranks - 1, me - 1));
  }

  // Each rank is alone in a group that is split from a group.
  BURST_ASSIGN_OR_RETURN(const auto alone, parity->Split(parity->rank(), 0));
  BURST_RETURN_IF_ERROR(CheckGroup(*alone, options, 1, 0));
  return CheckGroup(comm, options, ranks, me);
}

// Messages of a group do not mix with messages of the world from which it was split. The last
// rank's messages in the world come after all those of the group.
absl::Status SplitIsIndependent(Communicator& comm, const CheckOptions& options) {
  const int me = comm.rank(), next = Next(comm), previous = Previous(comm);
  BURST_ASSIGN_OR_RETURN(const auto twin, comm.Split(0, me));
  const MessageBuffer a(Message(5000, me, next, 1), options.device);
  const MessageBuffer b(Message(5000, me, next, 2), options.device);
  const MessageBuffer a_in(5000, options.device), b_in(5000, options.device);
  const SendBuffer send_a = a.To(next), send_b = b.To(next);
  const ReceiveBuffer receive_a = a_in.From(previous), receive_b = b_in.From(previous);
  const bool late = next == 0;
  if (!late) BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_a, 1}, {&receive_a, 1}));
  BURST_RETURN_IF_ERROR(twin->Post(Channel::kRead, {&send_b, 1}, {&receive_b, 1}));
  BURST_RETURN_IF_ERROR(twin->Wait(Channel::kRead));
  EXPECT_TRUE(b_in.Holds(Message(5000, previous, me, 2)));
  if (late) BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send_a, 1}, {&receive_a, 1}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  EXPECT_TRUE(a_in.Holds(Message(5000, previous, me, 1)));
  return absl::OkStatus();
}

// Returns the bytes that all ranks sent on the collective channel since the last call, according to
// Stats.
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
  BURST_RETURN_IF_ERROR(CheckRing(comm, options));
  const int64_t transfers = ranks == 1 ? 0 : ranks;
  EXPECT_EQ(comm.stats().bytes_sent, (std::array<int64_t, 3>{transfers * 100'000, 0, 0}));
  EXPECT_EQ(comm.stats().messages_sent, (std::array<int64_t, 3>{transfers, 0, 0}));
  return absl::OkStatus();
}

// Bad arguments are refused at once, and the communicator stays usable.
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
  return CheckRing(comm, options);
}

// Ranks that wait count the time, and a rank that comes late does not.
absl::Status MessageTime(Communicator& comm, const CheckOptions& options) {
  if (options.device != DeviceType::kCpu || comm.world_size() == 1) return absl::OkStatus();
  BURST_RETURN_IF_ERROR(comm.Barrier());
  const double before = ScopedMessageTime::Seconds();
  const bool late = comm.rank() == 0;
  if (late) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  BURST_RETURN_IF_ERROR(comm.Barrier());
  const double seconds = ScopedMessageTime::Seconds() - before;
  EXPECT_TRUE(late ? seconds < 0.1 : seconds > 0.1) << seconds << " on rank " << comm.rank();
  return absl::OkStatus();
}

}  // namespace

const std::vector<CommunicatorCheck>& CommunicatorChecks() {
  static const auto* const checks = new std::vector<CommunicatorCheck>{
      {"Ring", CheckRing},
      {"Ordering", CheckOrdering},
      {"Channels", CheckChannels},
      {"UnevenSizes", CheckUnevenSizes},
      {"LargeMessages", CheckLargeMessages},
      {"ZeroBytes", CheckZeroBytes},
      {"SelfSend", CheckSelfSend},
      {"RandomTraffic", CheckRandomTraffic},
      {"StreamOrder", StreamOrder},
      {"AllReduce", CheckAllReduce},
      {"AllReduceInPieces", CheckAllReduceInPieces},
      {"PostedAllReduce", PostedAllReduce},
      {"Parts", Parts},
      {"Broadcast", Broadcast},
      {"AllGather", AllGather},
      {"Barrier", Barrier},
      {"MessageTime", MessageTime},
      {"Split", Split},
      {"SplitIsIndependent", SplitIsIndependent},
      {"Counters", Counters},
      {"BadArguments", BadArguments},
  };
  return *checks;
}

}  // namespace burst
