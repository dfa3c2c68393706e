// Communicator: a group of ranks that exchange memory. One interface, one implementation per
// transport: threads of one process (thread_communicator.h), MPI (mpi_communicator.h), sockets
// (tcp_communicator.h), and NCCL between GPUs (gpu/gpu_communicator.h).
//
// Host memory travels on all of them, GPU memory on NCCL and, with host waits, between threads. A
// message leaves memory of the kind it arrives in. What a call does with GPU memory is queued on
// the calling thread's stream: a Post takes place when all that was queued before it is done, and
// what is queued after a Wait comes after the messages. Between GPUs neither waits for a GPU,
// though a Wait may hold the host until the other ends are posted; on NCCL the Posts of one channel
// take place one after the other: a rank that sends in one Post and receives in the next must not
// wait for a rank that does the same.
//
// Every rank calls the collectives in the same order. A communicator belongs to one thread; it is
// not synchronised. Errors: Unavailable when the transport failed or another rank gave up,
// InvalidArgument for a bad rank or buffer and for a message that is not as long as its receiver
// expects. A Post refused for its arguments posts nothing; after any other error the communicator
// is good for nothing but Abort.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Independent streams of messages between the same ranks: a transfer on one never waits for another
// channel's. The ring reads its blocks on one and returns query gradients on another.
enum class Channel { kRead = 0, kGradient = 1, kCollective = 2 };
inline constexpr int kNumChannels = 3;

struct SendBuffer {
  const void* data;
  int64_t bytes;
  int peer;
  DeviceType device = DeviceType::kCpu;  // whose memory it is
};

struct ReceiveBuffer {
  void* data;
  int64_t bytes;  // exactly what the peer sends; NCCL does not check it
  int peer;
  DeviceType device = DeviceType::kCpu;
};

// What this rank sent to other ranks, by channel.
struct CommStats {
  std::array<int64_t, kNumChannels> bytes_sent = {};
  std::array<int64_t, kNumChannels> messages_sent = {};
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Starts all of the sends and receives and returns at once. Messages between two ranks on one
  // channel arrive in the order they were posted. Until Wait(channel) returns, no buffer of a
  // receive may be touched and none of a send changed or freed. Sending to oneself is allowed (GPU
  // memory on NCCL: if the same Post receives it). Messages of zero bytes are dropped on both
  // sides.
  absl::Status Post(Channel channel, absl::Span<const SendBuffer> sends,
                    absl::Span<const ReceiveBuffer> receives);
  // Completes everything posted on the channel.
  virtual absl::Status Wait(Channel channel) = 0;
  // Messages of GPU memory are carried by kernels, which need multiprocessors beside those of other
  // work: a kernel that holds all of them to its end keeps messages from being hidden under it.
  virtual bool messages_are_kernels() const { return false; }

  // For a rank that cannot go on: frees those that wait for it. Threads: every pending and later
  // call of every rank, in this group and all others split from the same world, fails with
  // Unavailable, naming this rank (by its number in the world) and the reason; once Abort, or a
  // call that failed so, returns, no buffer this rank posted is in use. Processes: writes the
  // reason to stderr and ends the whole job with exit code 1; does not return.
  virtual void Abort(const absl::Status& reason) = 0;

  // A communicator of the ranks that gave the same color, ordered by key, then by rank; null for
  // those that gave a negative color. Collective.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) = 0;

  // Collectives, built on Post and Wait; an implementation with something faster overrides them.
  //
  // Contiguous, floating point, in place, the same device on every rank. All ranks hold bitwise
  // equal results, and every run on the same ranks has the same ones. Element i of n is summed in
  // the order of the ranks s, s+1, ... s+G-1 (mod G), s being its segment (RingSegment below), so
  // that the results are those of every other transport too; except that NCCL sums GPU memory in an
  // order that it derives from the machine, the number of ranks and n. A rank sends 2(G-1)/G of the
  // tensor.
  virtual absl::Status AllReduceSum(const Tensor& tensor);
  // Starts AllReduceSum; the tensor may not be touched until Wait(Channel::kCollective) returns.
  // Beside other work with GPU memory on NCCL; everywhere else it is done on return.
  virtual absl::Status PostAllReduceSum(const Tensor& tensor) { return AllReduceSum(tensor); }
  // Two more that start as PostAllReduceSum does, of a tensor in parts: counts[r] elements belong
  // to rank r, behind those of the ranks before it.
  //
  // Every rank's `own` becomes its part of `all` on all ranks. Contiguous, of one dtype, not
  // overlapping, the same device on every rank. A rank sends `own` to each other one.
  virtual absl::Status PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                          const Tensor& all);
  // own: the sum over the ranks of this rank's part of their `all`, which stays; floating point,
  // otherwise as above. Summed in the order of the ranks and in float32 at least; GPU memory on
  // NCCL, where parts are equal, as AllReduceSum says. A rank sends every other one its part.
  virtual absl::Status PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                            const Tensor& own);
  // Of host memory; or of a contiguous tensor on any device.
  absl::Status Broadcast(void* data, int64_t bytes, int root);
  absl::Status Broadcast(const Tensor& tensor, int root);
  // Returns when all ranks have called it. Of a GPU's queued work it says nothing.
  virtual absl::Status Barrier();
  // One value a rank, in order of rank.
  absl::StatusOr<std::vector<double>> AllGather(double value);

  const CommStats& stats() const { return stats_; }
  void ResetStats() { stats_ = CommStats(); }

 protected:
  // Peers and sizes are valid and no message is empty.
  virtual absl::Status DoPost(Channel channel, absl::Span<const SendBuffer> sends,
                              absl::Span<const ReceiveBuffer> receives) = 0;

  void CountSent(Channel channel, int64_t bytes, int64_t messages);
  // Counts what AllReduceSum of n elements sends, for implementations that move it otherwise.
  void CountAllReduce(int64_t n, int64_t element_bytes);

 private:
  // Sends to one rank, receives from another and waits.
  absl::Status Exchange(SendBuffer send, ReceiveBuffer receive);
  absl::Status Broadcast(void* data, int64_t bytes, DeviceType device, int root);

  CommStats stats_;
  std::vector<SendBuffer> sends_;  // of the Post at work, kept for its memory
  std::vector<ReceiveBuffer> receives_;
  Tensor scratch_;  // what AllReduceSum receives
};

// Segment s of `count` in n elements; s is taken modulo count, so ring arithmetic needs no care.
struct Segment {
  int64_t begin, end;
};
Segment RingSegment(int64_t n, int64_t s, int count);

// For transports of host memory only: InvalidArgument, naming the transport, if any buffer is on
// another device.
absl::Status CheckHostMemory(const char* transport, absl::Span<const SendBuffer> sends,
                             absl::Span<const ReceiveBuffer> receives);

}  // namespace burst
