// Tells which of the work that its rank has queued a GPU has reached. At marks on the rank's
// stream, and behind messages on other streams, the GPU writes a number into the host's memory. The
// watchdog can read it even when the driver does not answer.
#pragma once

#include <cstdint>
#include <memory>

#include "burst/base/progress.h"
#include "burst/device/device.h"

namespace burst {

// While it lives, the calling thread's rank (current_progress) marks its work on the GPU that the
// thread is bound to. Null on the CPU, where the host's own place says all, where streams cannot
// write to memory, and while nobody watches (ProgressIsWatched).
std::unique_ptr<DeviceMarks> MarkDeviceProgress(DeviceType device);

// Messages on a stream of the calling thread's GPU: which of them it has not finished. For one
// thread, whose rank marks its work (else this does nothing); ends before that does.
class MessageMarks {
 public:
  // "read"; a literal.
  explicit MessageMarks(const char* channel);
  ~MessageMarks();
  MessageMarks(const MessageMarks&) = delete;
  MessageMarks& operator=(const MessageMarks&) = delete;

  // A message was queued on the stream (a cudaStream_t): "ncclAllReduce", -1 or one rank it goes to
  // or comes from, and its size.
  void Queued(void* stream, const char* what, int peer, int64_t bytes);

 private:
  void* stream_ = nullptr;  // what the rank's marks know of it; null: they know nothing
};

}  // namespace burst
