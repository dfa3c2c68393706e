// The state that the communicators of one RunRanks share: a lock, the state of every rank, the
// first failure, and each group's queues of messages. For thread_communicator.cc.
//
// A message is copied by its receiver, straight from the sender's memory to its own.
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

  // The lock is held for less than a microsecond, so a thread spins for it before it sleeps.
  Lock Acquire();
  void Reacquire(Lock& lock);

  // The lock is held for all calls below. `rank`: in the world.

  // Only the first failure counts: RunRanks returns its cause(), communicators' calls aborted().
  void Fail(int rank, const absl::Status& cause);
  const absl::Status& cause() const { return cause_; }
  const absl::Status& aborted() const { return aborted_; }

  // The body of the rank has returned.
  void Leave(int rank);
  bool has_left(int rank) const { return ranks_[rank].left; }

  // Sleep releases the lock and returns, with the lock, after the rank's next Wake. Before the
  // thread gives up its core it calls blocks(), with the lock.
  void Wake(int rank);
  template <typename Blocks>
  void Sleep(Lock& lock, int rank, Blocks&& blocks) {
    Rank& self = ranks_[rank];
    const uint64_t seen = self.events.load(std::memory_order_relaxed);
    if (Spin(lock, rank, seen)) return;
    blocks();
    while (self.events.load(std::memory_order_relaxed) == seen) self.woken.wait(lock);
  }

  // Between BeginCopy and EndCopy, another rank reads memory of this one without the lock.
  void BeginCopy(int rank) { ++ranks_[rank].copies; }
  void EndCopy(int rank);
  // Returns when nobody copies from the rank's memory. After a failure no copy begins.
  void AwaitCopies(Lock& lock, int rank);

 private:
  struct Rank {
    std::atomic<uint64_t> events{0};  // counts Wakes
    std::condition_variable woken;
    int copies = 0;
    bool left = false;
  };

  // Whether the rank's next Wake came while the thread spun for it, without the lock.
  bool Spin(Lock& lock, int rank, uint64_t seen);

  std::mutex mutex_;
  absl::Status cause_, aborted_;
  std::vector<Rank> ranks_;
  const int spins_;  // before a thread sleeps
  const std::function<void(const absl::Status&)> on_failure_;
};

// First in, first out; its memory is reused.
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
  std::vector<T> items_;  // items before head_ were popped
  size_t head_ = 0;
};

// The state of one communicator, shared by its ranks and guarded by the lock of the world.
struct ThreadGroup {
  ThreadGroup(ThreadWorld& world, std::vector<int> world_ranks);

  // Messages on one channel from one rank to another that are not copied yet. The k-th send matches
  // the k-th receive.
  struct Link {
    MessageQueue<SendBuffer> sends;
    MessageQueue<ReceiveBuffer> receives;
  };
  Link& link(int channel, int source, int destination) {
    return links[(channel * size + source) * size + destination];
  }

  struct Rank {
    std::array<int64_t, kNumChannels> pending = {};  // sends and receives not completed
    // Arguments and results of the collective that the ranks meet for.
    int color, key;
    const Tensor* tensor;
    std::shared_ptr<ThreadGroup> subgroup;
    int subgroup_rank;
  };

  // Lets the ranks that wait in a meeting (a barrier inside a collective) continue: all are there.
  void EndMeeting();

  ThreadWorld& world;
  const std::vector<int> world_ranks;  // the group's ranks as ranks of the world
  const int size;
  std::vector<Link> links;  // [channel, source, destination]
  std::vector<Rank> ranks;
  int arrived = 0;       // ranks that wait in the current meeting
  int64_t meetings = 0;  // meetings that have ended
};

}  // namespace burst
