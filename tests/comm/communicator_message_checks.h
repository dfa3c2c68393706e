// The checks of messages between two ranks, for communicator_checks.h, and the messages that other
// checks use.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/device/memory.h"
#include "tests/comm/communicator_checks.h"

namespace burst {

using Bytes = std::vector<unsigned char>;

// Returns a message whose content is different for every (source, destination, number).
Bytes Message(int64_t size, int source, int destination, int number);

// Holds bytes on a device, to be sent or received.
class MessageBuffer {
 public:
  MessageBuffer(int64_t size, DeviceType device)
      : memory_(AllocateMemory(device, size)), size_(size) {}
  MessageBuffer(const Bytes& content, DeviceType device) : MessageBuffer(content.size(), device) {
    Set(content);
  }
  ~MessageBuffer() { FreeMemory(memory_); }
  MessageBuffer(const MessageBuffer&) = delete;
  MessageBuffer& operator=(const MessageBuffer&) = delete;

  void Set(const Bytes& content) {
    CopyMemory(memory_.data, memory_.device, content.data(), DeviceType::kCpu, size_);
  }
  bool Holds(const Bytes& content) const {
    Bytes bytes(size_);
    CopyMemory(bytes.data(), DeviceType::kCpu, memory_.data, memory_.device, size_);
    return bytes == content;
  }
  SendBuffer To(int peer) const { return {memory_.data, size_, peer, memory_.device}; }
  ReceiveBuffer From(int peer) const { return {memory_.data, size_, peer, memory_.device}; }

 private:
  const Allocation memory_;
  const int64_t size_;
};

// Return the neighbors of a rank in the ring of all ranks.
inline int Next(const Communicator& comm) { return (comm.rank() + 1) % comm.world_size(); }
inline int Previous(const Communicator& comm) {
  return (comm.rank() + comm.world_size() - 1) % comm.world_size();
}

// Checks that a block goes around the whole ring, double-buffered: after h transfers a rank has the
// block of rank - h.
absl::Status CheckRing(Communicator& comm, const CheckOptions& options);
absl::Status CheckOrdering(Communicator& comm, const CheckOptions& options);
// Checks that a receive that cannot complete yet on one channel does not delay other channels.
// Messages arrive whichever channel their receiver waits on.
absl::Status CheckChannels(Communicator& comm, const CheckOptions& options);
absl::Status CheckUnevenSizes(Communicator& comm, const CheckOptions& options);
absl::Status CheckLargeMessages(Communicator& comm, const CheckOptions& options);
// Checks messages of no bytes: both sides drop them.
absl::Status CheckZeroBytes(Communicator& comm, const CheckOptions& options);
absl::Status CheckSelfSend(Communicator& comm, const CheckOptions& options);
// Checks random traffic by a plan that every rank knows. Any number of messages of any size go
// between any pair on any channel, with several steps in flight. On a GPU some messages are in host
// memory.
absl::Status CheckRandomTraffic(Communicator& comm, const CheckOptions& options);

}  // namespace burst
