// Copies between a device's memory and the host's, in parallel with kernels. A GPU's copy engines
// make them on a stream of their own. On the CPU they are done at once.
#pragma once

#include <cstddef>

#include "burst/device/device.h"

namespace burst {

// Belongs to one thread. Copies run one after the other.
class CopyStream {
 public:
  explicit CopyStream(DeviceType device);
  ~CopyStream();  // the copies are done then
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;

  // A point behind some of the copies. Belongs to the same thread, and may outlive the stream.
  class Mark {
   public:
    explicit Mark(DeviceType device);
    ~Mark();
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

    // Makes work that the thread queues from now on wait for the copies before the mark.
    void Wait() const;

   private:
    friend class CopyStream;
    void* event_ = nullptr;  // of a GPU
    double time_ = 0;        // of a simulated one
  };

  // Queues a copy after all work that the thread has queued so far, and moves the mark behind it.
  // If the host's memory is not page-locked (HostBuffer), the host waits.
  void Copy(void* to, DeviceType to_device, const void* from, DeviceType from_device, size_t bytes,
            Mark* behind);

 private:
  void* stream_ = nullptr;  // of a GPU, with the event for the thread's work
  void* event_ = nullptr;
  double free_ = 0;  // of a simulated GPU: when its copies are done
};

}  // namespace burst
