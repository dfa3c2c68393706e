#include "burst/comm/thread/thread_communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "burst/base/check.h"
#include "burst/base/host_memory.h"
#include "burst/base/parallel.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/comm/message_time.h"
#include "burst/comm/thread/thread_world.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr int64_t kCopyGrain = 1 << 20;  // the fewest bytes that a thread copies
constexpr int64_t kSumBlock = 1 << 12;   // elements reduced at a time, in the first-level cache
constexpr int64_t kSumGrain = 8 * kSumBlock;  // the fewest elements that a thread reduces

using Lock = ThreadWorld::Lock;

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank)
      : group_(std::move(group)), world_(group_->world), rank_(rank) {}
  ~ThreadCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override { return group_->size; }
  int WorldRank(int rank) const override { return group_->world_ranks[rank]; }

  absl::Status Wait(Channel channel) override;
  void Abort(const absl::Status& reason) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;
  absl::Status AllReduceSum(const Tensor& tensor) override;

 protected:
  absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                      absl::Span<const ReceiveBuffer> receives) override;

 private:
  int world_rank() const { return group_->world_ranks[rank_]; }
  ThreadGroup::Rank& self() { return group_->ranks[rank_]; }

  bool CopyNext(Lock& lock, int channel);
  template <typename Done>
  absl::Status Await(Lock& lock, int channel, Done done);
  template <typename Last>
  absl::Status Meet(Lock& lock, Last last);
  void MeetRegardless(Lock& lock);
  absl::Status GiveUp(Lock& lock, const absl::Status& reason);
  int AbsentPeer(int channel) const;
  void SayWait(int channel);

  const std::shared_ptr<ThreadGroup> group_;
  ThreadWorld& world_;
  const int rank_;
};

absl::Status ThreadCommunicator::DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                                        absl::Span<const ReceiveBuffer> receives) {
  const auto on_gpu = [](const auto& buffer) { return buffer.device == DeviceType::kCuda; };
  if (std::any_of(sends.begin(), sends.end(), on_gpu) ||
      std::any_of(receives.begin(), receives.end(), on_gpu)) {
    SynchronizeDevice(DeviceType::kCuda);  // waits for kernels that write or read the buffers
  }
  const int c = static_cast<int>(channel);
  Lock lock = world_.Acquire();
  if (!world_.aborted().ok()) return GiveUp(lock, world_.aborted());
  for (const ReceiveBuffer& receive : receives) {
    group_->link(c, receive.peer, rank_).receives.push(receive);
  }
  for (const SendBuffer& send : sends) {
    group_->link(c, rank_, send.peer).sends.push(send);
    if (send.peer != rank_) world_.Wake(group_->world_ranks[send.peer]);
  }
  self().pending[c] += sends.size() + receives.size();
  return absl::OkStatus();
}

void Copy(const ReceiveBuffer& to, const SendBuffer& from) {
  if (to.device == DeviceType::kCuda || from.device == DeviceType::kCuda) {
    CopyMemory(to.data, to.device, from.data, from.device, to.bytes);
    SynchronizeDevice(DeviceType::kCuda);
    return;
  }
  ParallelFor(to.bytes, kCopyGrain, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to.data) + begin, static_cast<const char*>(from.data) + begin,
                end - begin);
  });
}

// Copies one message whose send and receive are both posted, if there is one. This channel's
// messages come first.
bool ThreadCommunicator::CopyNext(Lock& lock, int channel) {
  for (int i = 0; i < kNumChannels; ++i) {
    const int c = (channel + i) % kNumChannels;
    for (int source = 0; source < group_->size; ++source) {
      ThreadGroup::Link& link = group_->link(c, source, rank_);
      if (link.sends.empty() || link.receives.empty()) continue;
      const SendBuffer from = link.sends.front();
      const ReceiveBuffer to = link.receives.front();
      if (from.bytes != to.bytes) {
        world_.Fail(world_rank(), absl::InvalidArgumentError(absl::StrCat(
                                      "rank ", rank_, " expected ", to.bytes, " bytes from rank ",
                                      source, ", which sent ", from.bytes)));
        return true;
      }
      world_.BeginCopy(group_->world_ranks[source]);
      lock.unlock();
      Copy(to, from);
      world_.Reacquire(lock);
      link.sends.pop();
      link.receives.pop();
      --self().pending[c];
      --group_->ranks[source].pending[c];
      world_.EndCopy(group_->world_ranks[source]);
      return true;
    }
  }
  return false;
}

// Returns once done() holds. Until then it receives messages of any channel, so that other ranks
// need not wait for this one.
template <typename Done>
absl::Status ThreadCommunicator::Await(Lock& lock, int channel, Done done) {
  bool said = false;
  while (!done()) {
    if (!world_.aborted().ok()) return GiveUp(lock, world_.aborted());
    if (CopyNext(lock, channel)) continue;
    if (const int peer = AbsentPeer(channel); peer >= 0) {
      return GiveUp(lock, absl::UnavailableError(absl::StrCat("rank ", rank_, " waits for rank ",
                                                              peer, ", which has finished")));
    }
    world_.Sleep(lock, world_rank(), [&] {
      SayWait(channel);
      said = true;
    });
  }
  if (said) EndWait();
  return absl::OkStatus();
}

// Tells the watchdog the channel's first message that is not complete, or the meeting.
void ThreadCommunicator::SayWait(int channel) {
  if (current_progress == nullptr) return;
  const char* const name = Name(static_cast<Channel>(channel));
  for (int peer = 0; self().pending[channel] > 0 && peer < group_->size; ++peer) {
    if (const auto& receives = group_->link(channel, peer, rank_).receives; !receives.empty()) {
      return current_progress->Wait("receives", name, WorldRank(peer), receives.front().bytes);
    }
    if (const auto& sends = group_->link(channel, rank_, peer).sends; !sends.empty()) {
      return current_progress->Wait("sends", name, WorldRank(peer), sends.front().bytes);
    }
  }
  current_progress->Wait("waits for the other ranks of a collective", name, -1, 0);
}

// Returns a rank that this one waits for although its body has returned, or -1.
int ThreadCommunicator::AbsentPeer(int channel) const {
  for (int peer = 0; peer < group_->size; ++peer) {
    if (!world_.has_left(group_->world_ranks[peer])) continue;
    if (group_->arrived > 0 || !group_->link(channel, rank_, peer).sends.empty() ||
        !group_->link(channel, peer, rank_).receives.empty()) {
      return peer;
    }
  }
  return -1;
}

absl::Status ThreadCommunicator::GiveUp(Lock& lock, const absl::Status& reason) {
  world_.Fail(world_rank(), reason);
  world_.AwaitCopies(lock, world_rank());
  return world_.aborted();
}

absl::Status ThreadCommunicator::Wait(Channel channel) {
  const ScopedMessageTime timed;
  const int c = static_cast<int>(channel);
  Lock lock = world_.Acquire();
  if (!world_.aborted().ok()) return GiveUp(lock, world_.aborted());
  return Await(lock, c, [&] { return self().pending[c] == 0; });
}

void ThreadCommunicator::Abort(const absl::Status& reason) {
  BURST_CHECK(!reason.ok()) << "Abort without a reason";
  Lock lock = world_.Acquire();
  (void)GiveUp(lock, reason);
}

// Withdraws messages that nobody waited for, because their memory may be freed next.
ThreadCommunicator::~ThreadCommunicator() {
  Lock lock = world_.Acquire();
  const auto& pending = self().pending;
  if (std::all_of(pending.begin(), pending.end(), [](int64_t n) { return n == 0; })) return;
  world_.AwaitCopies(lock, world_rank());
  for (int c = 0; c < kNumChannels; ++c) {
    for (int peer = 0; peer < group_->size; ++peer) {
      group_->link(c, rank_, peer).sends.clear();
      group_->link(c, peer, rank_).receives.clear();
    }
  }
}

// A barrier, which returns when all ranks of the group have called it. The last rank runs last()
// before any rank continues. If last() fails, the world is aborted.
template <typename Last>
absl::Status ThreadCommunicator::Meet(Lock& lock, Last last) {
  if (!world_.aborted().ok()) return GiveUp(lock, world_.aborted());
  const int64_t meeting = group_->meetings;
  if (++group_->arrived == group_->size) {
    if (const absl::Status status = last(); !status.ok()) return GiveUp(lock, status);
    group_->EndMeeting();
  }
  return Await(lock, static_cast<int>(Channel::kCollective),
               [&] { return group_->meetings != meeting; });
}

// Waits for all ranks, even after an abort. Callers use it at points that every rank reaches.
void ThreadCommunicator::MeetRegardless(Lock& lock) {
  const int64_t meeting = group_->meetings;
  if (++group_->arrived == group_->size) group_->EndMeeting();
  while (group_->meetings == meeting) {
    world_.Sleep(lock, world_rank(), [&] { SayWait(static_cast<int>(Channel::kCollective)); });
  }
  EndWait();
}

absl::StatusOr<std::unique_ptr<Communicator>> ThreadCommunicator::Split(int color, int key) {
  ThreadGroup& group = *group_;
  // Forms the groups. After sorting by color, key and rank, the ranks of a group are consecutive.
  const auto form = [&group] {
    std::vector<int> order(group.size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return std::tie(group.ranks[a].color, group.ranks[a].key) <
             std::tie(group.ranks[b].color, group.ranks[b].key);
    });
    for (auto begin = order.begin(), end = begin; begin != order.end(); begin = end) {
      const int color = group.ranks[*begin].color;
      end = std::find_if(begin, order.end(), [&](int r) { return group.ranks[r].color != color; });
      if (color < 0) continue;
      std::vector<int> world_ranks;
      for (auto it = begin; it != end; ++it) world_ranks.push_back(group.world_ranks[*it]);
      const auto subgroup = std::make_shared<ThreadGroup>(group.world, std::move(world_ranks));
      for (auto it = begin; it != end; ++it) {
        group.ranks[*it].subgroup = subgroup;
        group.ranks[*it].subgroup_rank = static_cast<int>(it - begin);
      }
    }
    return absl::OkStatus();
  };
  Lock lock = world_.Acquire();
  self().color = color;
  self().key = key;
  BURST_RETURN_IF_ERROR(Meet(lock, form));
  std::unique_ptr<Communicator> result;
  if (color >= 0) {
    result = std::make_unique<ThreadCommunicator>(std::move(self().subgroup), self().subgroup_rank);
  }
  return result;
}

// Replaces segment s of every rank's tensor by its sum over the ranks, in AllReduceSum's order.
template <typename T>
void SumSegment(absl::Span<T* const> tensors, int s, Segment segment) {
  const int size = static_cast<int>(tensors.size());
  const auto sum_range = [&](int64_t begin, int64_t end) {
    alignas(64) std::array<T, kSumBlock> sum;
    for (int64_t block = begin; block < end; block += kSumBlock) {
      const int64_t at = segment.begin + block, n = std::min(kSumBlock, end - block);
      std::copy_n(tensors[s] + at, n, sum.data());
      for (int i = 1; i < size; ++i) {
        const T* x = tensors[(s + i) % size] + at;
        for (int64_t j = 0; j < n; ++j) sum[j] += x[j];
      }
      for (T* tensor : tensors) std::copy_n(sum.data(), n, tensor + at);
    }
  };
  ParallelFor(segment.end - segment.begin, kSumGrain, std::cref(sum_range));  // no allocation
}

// In shared memory, each rank reduces one segment of all ranks' tensors and writes the sum to all
// of them.
absl::Status ThreadCommunicator::AllReduceSum(const Tensor& tensor) {
  BURST_CHECK(tensor.is_contiguous()) << ToString(tensor.shape());
  BURST_CHECK(tensor.dtype() != DType::kInt32) << "cannot reduce " << Name(tensor.dtype());
  if (tensor.device() != DeviceType::kCpu || Is16Bit(tensor.dtype())) {
    return Communicator::AllReduceSum(tensor);
  }
  const ScopedMessageTime timed;
  ThreadGroup& group = *group_;
  Lock lock = world_.Acquire();
  self().tensor = &tensor;
  BURST_RETURN_IF_ERROR(Meet(lock, [&group] {
    const Tensor& first = *group.ranks[0].tensor;
    for (int r = 1; r < group.size; ++r) {
      const Tensor& other = *group.ranks[r].tensor;
      if (other.numel() == first.numel() && other.dtype() == first.dtype()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("AllReduceSum of ", first.numel(), " ", Name(first.dtype()),
                       " on rank 0 and ", other.numel(), " ", Name(other.dtype()), " on rank ", r));
    }
    return absl::OkStatus();
  }));
  lock.unlock();
  DispatchFloat(tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    absl::InlinedVector<T*, 16> tensors;
    for (const ThreadGroup::Rank& rank : group.ranks)
      tensors.push_back(rank.tensor->template data<T>());
    const int s = (rank_ + 1) % group.size;
    SumSegment<T>(tensors, s, RingSegment(tensor.numel(), s, group.size));
  });
  CountAllReduce(tensor.numel(), SizeOf(tensor.dtype()));
  world_.Reacquire(lock);
  MeetRegardless(lock);  // others write to this tensor until all are done
  return absl::OkStatus();
}

// Runs the body on this rank; exceptions become errors.
absl::Status RunBody(const std::function<absl::Status(Communicator&)>& body,
                     ThreadCommunicator communicator) {
  const auto threw = [&](const char* what) {
    return absl::InternalError(absl::StrCat("rank ", communicator.rank(), " threw: ", what));
  };
  try {
    return body(communicator);
  } catch (const std::exception& exception) {
    return threw(Describe(exception));
  } catch (...) {
    return threw("not a std::exception");
  }
}

}  // namespace

absl::Status RunRanks(int world_size, const std::function<absl::Status(Communicator&)>& body,
                      const std::function<void(const absl::Status& failure)>& on_failure) {
  if (world_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("a world of ", world_size, " ranks"));
  }
  ThreadWorld world(world_size, on_failure);
  std::vector<int> world_ranks(world_size);
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  const auto group = std::make_shared<ThreadGroup>(world, std::move(world_ranks));

  const auto run = [&](int rank) {
    const ScopedRankProgress progress(rank);
    const absl::Status status = RunBody(body, ThreadCommunicator(group, rank));
    Lock lock = world.Acquire();
    if (!status.ok()) world.Fail(rank, status);
    world.Leave(rank);
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    try {
      threads.emplace_back(run, rank);
    } catch (const std::system_error& error) {
      Lock lock = world.Acquire();
      world.Fail(rank, absl::ResourceExhaustedError(
                           absl::StrCat("no thread for rank ", rank, ": ", error.what())));
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  return world.cause();
}

}  // namespace burst
