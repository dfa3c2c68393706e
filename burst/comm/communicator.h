// Communicator: a group of ranks that exchange memory. One interface, several implementations:
//
//   thread/  ranks are threads of one process                  host memory; GPU memory for tests
//   gpu/     ranks own one GPU each, as threads or processes   GPU memory and host memory
//   tcp/     ranks are processes, connected by sockets         host memory
//   mpi/     ranks are processes under mpirun                  host memory
//   simulated/  ranks are threads with simulated GPUs          times alone, no memory
//
// Sender and receiver use the same kind of memory. GPU memory is ordered by the calling thread's
// stream. A Post sends and receives once all earlier queued work is done, and work queued after a
// Wait starts after the messages. With gpu/ neither call waits for a GPU, but a Wait may block the
// host until the other ranks have posted. Where NCCL carries messages, the Posts of a channel run
// one by one. Two ranks must not both send in one Post and receive in the next.
//
// Every rank calls the collectives in the same order. A communicator belongs to one thread and is
// not synchronized. Errors: Unavailable if the transport failed or another rank gave up;
// InvalidArgument for a bad rank or buffer, or a message whose length its receiver does not expect.
// A Post that returns InvalidArgument for its own arguments posts nothing. After any other error
// only Abort may be called.
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

// Independent streams of messages between the same ranks: a transfer on one channel never waits for
// another channel.
enum class Channel {
  kRead = 0,        // blocks of the ring; the all-to-all of Ulysses
  kGradient = 1,    // gradients in transit around the ring
  kCollective = 2,  // all collectives, those of parameter gradients too; checkpoints
};
inline constexpr int kNumChannels = 3;
const char* Name(Channel channel);  // "read"

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
  // Returns the number of a rank of this group among all ranks, for messages to users.
  virtual int WorldRank(int rank) const { return rank; }

  // Starts all of the sends and receives and returns at once. Messages between two ranks on one
  // channel arrive in the order they were posted. Until Wait(channel) returns, no buffer of a
  // receive may be touched and none of a send changed or freed. Sending to oneself is allowed (GPU
  // memory on NCCL: if the same Post receives it). Messages of zero bytes are dropped on both
  // sides.
  absl::Status Post(Channel channel, absl::Span<const SendBuffer> sends,
                    absl::Span<const ReceiveBuffer> receives);
  // Completes all messages posted on the channel.
  virtual absl::Status Wait(Channel channel) = 0;
  // Whether messages of `bytes` bytes of GPU memory are kernels, which need multiprocessors. A
  // persistent kernel that occupies all multiprocessors then delays the messages, and their time is
  // exposed.
  virtual bool messages_are_kernels(int64_t /*bytes*/) const { return false; }

  // Ends the group for a rank that cannot continue, and frees the ranks that wait for it.
  //
  // With threads, every pending and later call of every rank returns Unavailable, with this rank's
  // number in the world and the reason. This holds for this group and all groups split from the
  // same world. Once Abort or such a call returns, no buffer that this rank posted is in use.
  //
  // With processes, Abort prints the reason to stderr and ends the whole job with exit code 1; it
  // does not return.
  virtual void Abort(const absl::Status& reason) = 0;

  // A communicator of the ranks that pass the same color, ordered by key, then by rank; null for a
  // negative color. Collective.
  virtual absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) = 0;

  // Collectives, built on Post and Wait; a transport with a faster way overrides them.
  //
  // All-reduces in place: tensor becomes its sum over the G ranks. It must be contiguous, of a
  // floating point dtype, and on the same device on every rank. All ranks get bitwise equal
  // results, and every run with the same number of ranks gets the same ones. A rank sends 2(G-1)/G
  // of the tensor.
  //
  // Element i is accumulated in the order of ranks s, s+1, ... s+G-1 (mod G), where s is its
  // segment (RingSegment below). NCCL is the exception: it reduces GPU memory in an order that
  // depends on the machine, G and the number of elements.
  virtual absl::Status AllReduceSum(const Tensor& tensor);
  // Starts AllReduceSum; the tensor may not be touched until Wait(Channel::kCollective) returns.
  // NCCL reduces GPU memory in parallel with other work; every other transport is done on return.
  virtual absl::Status PostAllReduceSum(const Tensor& tensor) { return AllReduceSum(tensor); }
  // The next two functions start like PostAllReduceSum. Their tensor is divided among the ranks:
  // rank r's part has counts[r] elements and follows the part of rank r - 1.
  //
  // All-gathers: copies every rank's `own` into its part of `all` on all ranks. The tensors are
  // contiguous, of one dtype, and on the same device on every rank. `own` is its part of `all`, or
  // does not overlap with `all`. A rank sends `own` to every other rank.
  virtual absl::Status PostAllGatherParts(const Tensor& own, absl::Span<const int64_t> counts,
                                          const Tensor& all);
  // Reduce-scatters: `own` becomes the sum over the ranks of this rank's part of `all`, which is
  // unchanged. Floating point, otherwise as above. The sum is accumulated in the order of the
  // ranks, in float32 at least. With equal parts in GPU memory over NCCL, it has NCCL's order. A
  // rank sends every other rank that rank's part.
  virtual absl::Status PostReduceScatterSum(const Tensor& all, absl::Span<const int64_t> counts,
                                            const Tensor& own);
  // Copies the root's bytes to all ranks: host memory, or a contiguous tensor on any device.
  absl::Status Broadcast(void* data, int64_t bytes, int root);
  absl::Status Broadcast(const Tensor& tensor, int root);
  // Returns when all ranks have called it. Does not wait for work queued on GPUs.
  virtual absl::Status Barrier();
  // Copies `bytes` bytes of host memory from every rank to `all`, in order of rank.
  absl::Status AllGather(const void* own, int64_t bytes, void* all);
  // The values of all ranks, in order of rank.
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
  std::vector<SendBuffer> sends_;  // the current Post's; members, so that their memory is reused
  std::vector<ReceiveBuffer> receives_;
  Tensor scratch_;  // where AllReduceSum receives
};

// Segment s of n elements divided into `count` segments; s is taken modulo count.
struct Segment {
  int64_t begin, end;
};
Segment RingSegment(int64_t n, int64_t s, int count);

// For transports of host memory only: InvalidArgument, naming the transport, if any buffer is on
// another device.
absl::Status CheckHostMemory(const char* transport, absl::Span<const SendBuffer> sends,
                             absl::Span<const ReceiveBuffer> receives);

}  // namespace burst
