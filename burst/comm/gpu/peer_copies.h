// Carries messages between GPUs of one process with the GPUs' copy engines. Unlike NCCL's messages,
// copies need no multiprocessors: they neither wait for running kernels nor slow them down. For
// gpu_communicator.cc.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/failure.h"

namespace burst {

// The meeting place for messages of a communicator whose ranks are threads of this process. The
// side that posts later, sender or receiver, queues the copy.
class PeerExchange {
 public:
  explicit PeerExchange(int world_size)
      : world_size_(world_size), boxes_(kNumChannels * world_size * world_size) {}

 private:
  friend class PeerCopies;

  // An event of the sender's GPU, recorded after copies of one Post. Its sender uses it again once
  // the receiver has let go of it.
  struct Done {
    explicit Done(cudaEvent_t event) : event(event) {}
    Done(const Done&) = delete;
    ~Done();
    cudaEvent_t event;
  };
  struct Transfer {
    Transfer(int from, int to, int64_t bytes) : from(from), to(to), bytes(bytes) {}
    const int from, to;  // ranks
    const int64_t bytes;
    const void* source = nullptr;
    void* destination = nullptr;
    cudaStream_t stream = nullptr;  // the sender's, of this channel
    cudaEvent_t source_ready = nullptr, destination_ready = nullptr;
    std::shared_ptr<Done> done;
    std::atomic<bool> queued{false};  // true once `done` was recorded after the copy
  };
  using Transfers = std::deque<std::shared_ptr<Transfer>>;
  // The messages from one rank to another on one channel that only one side has posted. Every pair
  // has its own lock, so that ranks do not wait for other ranks' calls of CUDA.
  struct Box {
    std::mutex mutex;
    std::condition_variable queued;
    Transfers sends, receives;  // in the order of their Posts; one of the two is empty
  };

  static std::shared_ptr<Transfer> Meet(Transfers& others, Transfers& own, int from, int to,
                                        int64_t bytes);
  Box& box(Channel channel, int from, int to) {
    return boxes_[(static_cast<int>(channel) * world_size_ + from) * world_size_ + to];
  }

  const int world_size_;
  std::vector<Box> boxes_;
};

// The exchanges of this process's communicators. Thread-safe.
class PeerExchanges {
 public:
  // Returns the exchange of the `world_size` ranks of the communicator that agreed on `key`. The
  // first call makes it; it is freed with the last user.
  std::shared_ptr<PeerExchange> Get(const std::string& key, int world_size);

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<PeerExchange>> exchanges_;
};

// One rank's side. Belongs to the rank's thread.
class PeerCopies {
 public:
  // All ranks of the communicator share `exchange` and `failure`. `world_ranks`: their numbers in
  // messages to users.
  PeerCopies(std::shared_ptr<PeerExchange> exchange, const FailureState* failure, int rank,
             std::vector<int> world_ranks);
  // Withdraws messages that the other side has not posted. The memory of other messages may be
  // freed next, in the order of the thread's stream.
  ~PeerCopies();

  // As Communicator::Post, for buffers on GPUs, to and from other ranks.
  absl::Status Post(Channel channel, absl::Span<const SendBuffer> sends,
                    absl::Span<const ReceiveBuffer> receives);
  // Makes the thread's stream wait for the copies. The host waits until the other sides have
  // posted, but not for any GPU.
  absl::Status Wait(Channel channel);

 private:
  using Box = PeerExchange::Box;
  using Done = PeerExchange::Done;
  using Transfer = PeerExchange::Transfer;
  struct Lane {
    cudaStream_t stream = nullptr;
    std::vector<std::shared_ptr<Transfer>> posted;  // since the last Wait
    std::vector<cudaEvent_t> ready;                 // recorded by those Posts
  };

  Lane& lane(Channel channel) { return lanes_[static_cast<int>(channel)]; }
  cudaEvent_t TakeEvent();
  void Queue(Box& box, absl::Span<const std::shared_ptr<Transfer>> met);
  absl::Status WaitUntilQueued(Channel channel, const Transfer& transfer);
  void SayWait(Channel channel, const Transfer& transfer) const;
  void Join(Lane& lane);

  const std::shared_ptr<PeerExchange> exchange_;
  const FailureState* const failure_;
  const int rank_;
  const std::vector<int> world_ranks_;
  std::array<Lane, kNumChannels> lanes_;
  std::vector<cudaEvent_t> idle_;  // events
  // Waited for here. Their events can be used again once the receiver has released them.
  std::deque<std::shared_ptr<Done>> sent_;
};

// Returns whether every two of these GPUs (indices in this process) can read and write each other's
// memory.
bool CanCopyBetween(absl::Span<const int> gpus);

}  // namespace burst
