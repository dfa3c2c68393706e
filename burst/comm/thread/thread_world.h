// What the communicators of one RunRanks share: a lock, the state of every rank, the first failure,
// and each group's queues of messages. For thread_communicator.cc.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {

// One lock guards the state of all ranks and groups; memory is copied without it.
class ThreadWorld {
 public:
  using Lock = std::unique_lock<std::mutex>;

  ThreadWorld(int size, std::function<void(const absl::Status&)> on_failure);

  // The lock is held for less than a microsecond: rather spin than sleep in the system.
  Lock Acquire();
  void Reacquire(Lock& lock);

  // All below are called with the lock held. `rank`: in the world.

  // The first failure decides: `cause` is what RunRanks returns, `aborted` what calls return.
  void Fail(int rank, const absl::Status& cause);
  const absl::Status& cause() const { return cause_; }
  const absl::Status& aborted() const { return aborted_; }

  // The body of the rank has returned.
  void Leave(int rank);
  bool has_left(int rank) const { return ranks_[rank].left; }

  // Sleep returns after the next Wake of the rank; the lock is released meanwhile.
  void Wake(int rank);
  void Sleep(Lock& lock, int rank);

  // Between BeginCopy and EndCopy, another rank reads memory of this one without the lock.
  void BeginCopy(int rank) { ++ranks_[rank].copies; }
  void EndCopy(int rank);
  // Returns when no copy of the rank's memory is under way. After a failure none begins.
  void AwaitCopies(Lock& lock, int rank);

 private:
  struct Rank {
    std::atomic<uint64_t> events{0};  // counts Wakes
    std::condition_variable woken;
    int copies = 0;
    bool left = false;
  };

  std::mutex mutex_;
  absl::Status cause_, aborted_;
  std::vector<Rank> ranks_;
  const int spins_;  // before a thread sleeps
  const std::function<void(const absl::Status&)> on_failure_;
};

// First in, first out; allocates nothing once it has grown.
template <typename T>
class MessageQueue {
 public:
  bool empty() const { return items_.empty(); }
  const T& front() const { return items_[head_]; }
  void push(const T& item) { items_.push_back(item); }
  void pop() {
    if (++head_ == items_.size()) clear();
  }
  void clear() {
    items_.clear();
    head_ = 0;
  }

 private:
  std::vector<T> items_;  // those before head_ are gone
  size_t head_ = 0;
};

// The state of one communicator, shared by its ranks and guarded by the lock of the world.
struct ThreadGroup {
  ThreadGroup(ThreadWorld& world, std::vector<int> members);

  // Messages of one channel from one rank to another that have not been copied yet. The k-th send
  // meets the k-th receive.
  struct Link {
    MessageQueue<SendBuffer> sends;
    MessageQueue<ReceiveBuffer> receives;
  };
  Link& link(int channel, int source, int destination) {
    return links[(channel * size + source) * size + destination];
  }

  struct Rank {
    std::array<int64_t, kNumChannels> pending = {};  // sends and receives not completed
    // What the rank brings to a meeting, or takes away.
    int color, key;
    const Tensor* tensor;
    std::shared_ptr<ThreadGroup> subgroup;
    int subgroup_rank;
  };

  // All ranks have come to the meeting: lets them go on.
  void EndMeeting();

  ThreadWorld& world;
  const std::vector<int> members;  // their ranks in the world
  const int size;
  std::vector<Link> links;  // [channel, source, destination]
  std::vector<Rank> ranks;
  int arrived = 0;       // ranks at the present meeting
  int64_t meetings = 0;  // that have ended
};

}  // namespace burst
