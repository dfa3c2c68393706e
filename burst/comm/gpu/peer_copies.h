// Carries messages between GPUs of one process with the GPUs' copy engines. Unlike NCCL's messages,
// copies need no multiprocessors: they neither wait for running kernels nor slow them down. For
// gpu_communicator.cc.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/failure.h"

namespace burst {

// The meeting place for messages of a communicator whose ranks are threads of this process. The
// side that posts later, sender or receiver, queues the copy.
class PeerExchange {
 private:
  friend class PeerCopies;

  struct Transfer {
    Transfer() = default;
    Transfer(const Transfer&) = delete;
    ~Transfer();
    const void* source = nullptr;
    void* destination = nullptr;
    int64_t bytes = 0;
    int from = 0, to = 0;
    cudaStream_t stream = nullptr;  // the sender's, of this channel
    cudaEvent_t source_ready = nullptr, destination_ready = nullptr;
    cudaEvent_t done = nullptr;  // of the sender's GPU; recorded once `queued`
    bool queued = false;
  };
  using Pair = std::tuple<Channel, int, int>;  // from, to

  std::mutex mutex_;
  std::condition_variable queued_;
  // Posted by one side, in order; one side's only.
  std::map<Pair, std::deque<std::shared_ptr<Transfer>>> sends_, receives_;
};

// The exchanges of this process's communicators. Thread-safe.
class PeerExchanges {
 public:
  // Returns the exchange of the communicator whose ranks agreed on `key`. The first call makes it;
  // it is freed with the last user.
  std::shared_ptr<PeerExchange> Get(const std::string& key);

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
  using Transfer = PeerExchange::Transfer;
  using Queues = std::map<PeerExchange::Pair, std::deque<std::shared_ptr<Transfer>>>;
  struct Lane {
    cudaStream_t stream = nullptr;
    std::vector<std::shared_ptr<Transfer>> posted;  // since the last Wait
    std::vector<cudaEvent_t> ready;                 // recorded by those Posts
  };

  // The lock of the exchange is held.
  cudaEvent_t TakeEvent();
  std::shared_ptr<Transfer> Meet(Queues& others, Queues& own, const PeerExchange::Pair& pair,
                                 int64_t bytes);
  void SayWait(Channel channel, const Transfer& transfer) const;
  void QueueIfMet(Transfer& transfer);
  void Join(Lane& lane);

  const std::shared_ptr<PeerExchange> exchange_;
  const FailureState* const failure_;
  const int rank_;
  const std::vector<int> world_ranks_;
  std::array<Lane, kNumChannels> lanes_;
  std::vector<cudaEvent_t> idle_;  // events
  // Waited for here. Their events can be used again once the receiver has released them.
  std::deque<std::shared_ptr<Transfer>> sent_;
};

// Returns whether every two of these GPUs (indices in this process) can read and write each other's
// memory.
bool CanCopyBetween(absl::Span<const int> gpus);

}  // namespace burst
