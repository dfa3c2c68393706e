#include "burst/comm/communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/comm/message_time.h"

namespace burst {
namespace {

// Elements of one message of AllReduceSum. They bound its scratch to 4 MiB (float64).
constexpr int64_t kPieceElements = 1 << 19;

// Appends the messages that are not empty; `role` is "send to" or "receive from".
template <typename Buffer>
absl::Status AppendMessages(absl::Span<const Buffer> from, int world_size, const char* role,
                            std::vector<Buffer>& to) {
  to.clear();
  for (const Buffer& buffer : from) {
    if (buffer.peer < 0 || buffer.peer >= world_size) {
      return absl::InvalidArgumentError(absl::StrCat("cannot ", role, " rank ", buffer.peer,
                                                     ": ranks are 0 to ", world_size - 1));
    }
    if (buffer.bytes < 0 || (buffer.bytes > 0 && buffer.data == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot ", role, " rank ", buffer.peer, " ", buffer.bytes, " bytes at ",
                       buffer.data == nullptr ? "null" : "an address"));
    }
    if (buffer.bytes > 0) to.push_back(buffer);
  }
  return absl::OkStatus();
}

}  // namespace

const char* Name(Channel channel) {
  static constexpr const char* kNames[kNumChannels] = {"read", "gradient", "collective"};
  return kNames[static_cast<int>(channel)];
}

Segment RingSegment(int64_t n, int64_t s, int count) {
  s = (s % count + count) % count;
  return {n * s / count, n * (s + 1) / count};
}

absl::Status Communicator::Post(Channel channel, absl::Span<const SendBuffer> sends,
                                absl::Span<const ReceiveBuffer> receives) {
  const int index = static_cast<int>(channel);
  if (index < 0 || index >= kNumChannels) {
    return absl::InvalidArgumentError(absl::StrCat("no channel ", index));
  }
  BURST_RETURN_IF_ERROR(AppendMessages(sends, world_size(), "send to", sends_));
  BURST_RETURN_IF_ERROR(AppendMessages(receives, world_size(), "receive from", receives_));
  const ScopedMessageTime timed;
  BURST_RETURN_IF_ERROR(DoPost(channel, sends_, receives_));
  for (const SendBuffer& send : sends_) {
    if (send.peer != rank()) CountSent(channel, send.bytes, 1);
  }
  return absl::OkStatus();
}

void Communicator::CountSent(Channel channel, int64_t bytes, int64_t messages) {
  stats_.bytes_sent[static_cast<int>(channel)] += bytes;
  stats_.messages_sent[static_cast<int>(channel)] += messages;
}

absl::Status Communicator::Exchange(SendBuffer send, ReceiveBuffer receive) {
  BURST_RETURN_IF_ERROR(Post(Channel::kCollective, {&send, 1}, {&receive, 1}));
  return Wait(Channel::kCollective);
}

// A ring reduce-scatter and then a ring all-gather in one loop. At step t a rank sends segment rank
// - t and receives segment rank - t - 1. For G - 1 steps each rank accumulates the segment that it
// receives. Then segment s is complete on rank s - 1. For G - 1 more steps it copies the segments
// that others completed. Segments longer than a piece are sent a piece at a time.
absl::Status Communicator::AllReduceSum(const Tensor& tensor) {
  const ScopedMessageTime timed;
  const int size = world_size(), next = (rank() + 1) % size, last = (rank() + size - 1) % size;
  BURST_CHECK(tensor.dtype() != DType::kInt32) << "cannot reduce " << Name(tensor.dtype());
  const Tensor flat = tensor.View({-1});
  const int64_t n = flat.numel(), longest = (n + size - 1) / size;
  if (size == 1) return absl::OkStatus();

  const int64_t piece = std::min(longest, kPieceElements);
  if (scratch_.null() || scratch_.dtype() != flat.dtype() || scratch_.device() != flat.device() ||
      scratch_.numel() < piece) {
    scratch_ = Tensor::Empty({piece}, flat.dtype(), flat.device());
  }
  for (int64_t offset = 0; offset < longest; offset += piece) {
    const auto part = [&](int s) {
      const Segment segment = RingSegment(n, s, size);
      const int64_t begin = std::min(segment.begin + offset, segment.end);
      return flat.Slice(0, begin, std::min(piece, segment.end - begin));
    };
    for (int step = 0; step < 2 * (size - 1); ++step) {
      const Tensor sent = part(rank() - step), here = part(rank() - step - 1);
      const bool adds = step < size - 1;
      const Tensor into = adds ? scratch_.Slice(0, 0, here.numel()) : here;
      BURST_RETURN_IF_ERROR(Exchange({sent.raw_data(), sent.size_bytes(), next, flat.device()},
                                     {into.raw_data(), into.size_bytes(), last, flat.device()}));
      if (adds) here.Add(into);
    }
  }
  return absl::OkStatus();
}

void Communicator::CountAllReduce(int64_t n, int64_t element_bytes) {
  for (int step = 0; step < 2 * (world_size() - 1); ++step) {
    const Segment sent = RingSegment(n, rank() - step, world_size());
    const int64_t length = sent.end - sent.begin;
    CountSent(Channel::kCollective, length * element_bytes,
              (length + kPieceElements - 1) / kPieceElements);
  }
}

// Sends along a binomial tree. In the step of distance d, the first d ranks, counted from the root,
// have the data and send it to the next d ranks.
absl::Status Communicator::Broadcast(void* data, int64_t bytes, DeviceType device, int root) {
  const int size = world_size();
  if (root < 0 || root >= size) {
    return absl::InvalidArgumentError(
        absl::StrCat("no root ", root, ": ranks are 0 to ", size - 1));
  }
  const int from_root = (rank() - root + size) % size;
  for (int distance = 1; distance < size; distance *= 2) {
    if (from_root < distance && from_root + distance < size) {
      const SendBuffer send = {data, bytes, (rank() + distance) % size, device};
      BURST_RETURN_IF_ERROR(Post(Channel::kCollective, {&send, 1}, {}));
    } else if (from_root >= distance && from_root < 2 * distance) {
      const ReceiveBuffer receive = {data, bytes, (rank() - distance + size) % size, device};
      BURST_RETURN_IF_ERROR(Post(Channel::kCollective, {}, {&receive, 1}));
      BURST_RETURN_IF_ERROR(Wait(Channel::kCollective));
    }
  }
  return Wait(Channel::kCollective);
}

namespace {

// Returns the parts of a tensor, one for each rank.
std::vector<Tensor> PartsOf(const Tensor& all, absl::Span<const int64_t> counts) {
  BURST_CHECK_EQ(std::accumulate(counts.begin(), counts.end(), int64_t{0}), all.numel());
  const Tensor flat = all.View({-1});
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (int64_t count : counts) {
    parts.push_back(flat.Slice(0, begin, count));
    begin += count;
  }
  return parts;
}

}  // namespace

// Each rank sends directly to all others, the next rank first.
absl::Status Communicator::PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                              const Tensor& all) {
  const ScopedMessageTime timed;
  const int size = world_size();
  const std::vector<Tensor> parts = PartsOf(all, counts);
  if (parts[rank()].raw_data() != own.raw_data()) parts[rank()].CopyFrom(own.View({-1}));
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank() + distance) % size, from = (rank() + size - distance) % size;
    sends.push_back({own.raw_data(), own.size_bytes(), to, own.device()});
    receives.push_back({parts[from].raw_data(), parts[from].size_bytes(), from, own.device()});
  }
  BURST_RETURN_IF_ERROR(Post(Channel::kCollective, sends, receives));
  return Wait(Channel::kCollective);
}

absl::Status Communicator::PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                                const Tensor& own) {
  const ScopedMessageTime timed;
  const int size = world_size();
  const Tensor result = own.View({-1});
  std::vector<Tensor> parts = PartsOf(all, counts);
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  std::vector<Tensor> received(size);
  received[rank()] = parts[rank()];
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank() + distance) % size, from = (rank() + size - distance) % size;
    received[from] = Tensor::EmptyLike(result);
    sends.push_back({parts[to].raw_data(), parts[to].size_bytes(), to, own.device()});
    receives.push_back(
        {received[from].raw_data(), received[from].size_bytes(), from, own.device()});
  }
  BURST_RETURN_IF_ERROR(Post(Channel::kCollective, sends, receives));
  BURST_RETURN_IF_ERROR(Wait(Channel::kCollective));
  const bool widened = Is16Bit(own.dtype());
  const Tensor sum = widened ? received[0].To(DType::kFloat32) : result;
  if (!widened) sum.CopyFrom(received[0]);
  for (int r = 1; r < size; ++r) sum.Add(received[r]);
  if (widened) result.CopyFrom(sum.To(own.dtype()));
  return absl::OkStatus();
}

absl::Status Communicator::Broadcast(void* data, int64_t bytes, int root) {
  return Broadcast(data, bytes, DeviceType::kCpu, root);
}

absl::Status Communicator::Broadcast(const Tensor& tensor, int root) {
  BURST_CHECK(tensor.is_contiguous()) << ToString(tensor.shape());
  return Broadcast(tensor.raw_data(), tensor.size_bytes(), tensor.device(), root);
}

// A dissemination barrier. After the step of distance d, a rank knows that the 2d - 1 ranks before
// it have arrived.
absl::Status Communicator::Barrier() {
  const int size = world_size();
  for (int distance = 1; distance < size; distance *= 2) {
    const char sent = 0;
    char received;
    BURST_RETURN_IF_ERROR(Exchange({&sent, 1, (rank() + distance) % size},
                                   {&received, 1, (rank() - distance + size) % size}));
  }
  return absl::OkStatus();
}

absl::Status Communicator::AllGather(const void* own, int64_t bytes, void* all) {
  char* const to = static_cast<char*>(all);
  if (bytes > 0) std::memmove(to + rank() * bytes, own, bytes);
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (peer == rank()) continue;
    sends.push_back({own, bytes, peer});
    receives.push_back({to + peer * bytes, bytes, peer});
  }
  BURST_RETURN_IF_ERROR(Post(Channel::kCollective, sends, receives));
  return Wait(Channel::kCollective);
}

absl::StatusOr<std::vector<double>> Communicator::AllGather(double value) {
  std::vector<double> values(world_size());
  BURST_RETURN_IF_ERROR(AllGather(&value, sizeof(double), values.data()));
  return values;
}

absl::Status CheckHostMemory(const char* transport, absl::Span<const SendBuffer> sends,
                             absl::Span<const ReceiveBuffer> receives) {
  const auto on_host = [](const auto& buffer) { return buffer.device == DeviceType::kCpu; };
  if (std::all_of(sends.begin(), sends.end(), on_host) &&
      std::all_of(receives.begin(), receives.end(), on_host)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(transport, " carries host memory only"));
}

}  // namespace burst
