// Tells how far a GPU has got in the work that its rank has queued. At marks on the rank's stream,
// and behind messages on other streams, the GPU writes a number into the host's memory. The
// watchdog can read it even when the driver does not answer.
#pragma once

#include <cstdint>
#include <memory>

#include "burst/base/progress.h"
#include "burst/device/device.h"

namespace burst {

// While it lives, the calling thread's rank (current_progress) marks its work on the GPU that the
// thread is bound to. Null on the CPU, where streams cannot write to memory, and while nobody
// watches (ProgressIsWatched).
std::unique_ptr<DeviceMarks> MarkDeviceProgress(DeviceType device);

// Records the unfinished messages on a stream of the calling thread's GPU. Belongs to one thread.
// It does nothing unless the thread's rank marks its work, and must end before the marks do.
class MessageMarks {
 public:
  // "read"; a literal.
  explicit MessageMarks(const char* channel);
  ~MessageMarks();
  MessageMarks(const MessageMarks&) = delete;
  MessageMarks& operator=(const MessageMarks&) = delete;

  // Records that a message was queued on the stream (a cudaStream_t). `what`: "ncclAllReduce", for
  // example. `peer`: the rank at the other end, or -1.
  void Queued(void* stream, const char* what, int peer, int64_t bytes);

 private:
  void* stream_ = nullptr;  // the stream in the rank's marks; null: not marked
};

}  // namespace burst
