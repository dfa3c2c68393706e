// Measures on a device's own clock how long a GPU takes for work that the host only queues.
#pragma once

#include <chrono>

#include "burst/device/device.h"

namespace burst {

// A point in the work that the calling thread has queued on a device; on the CPU, a point in time.
// Belongs to one thread.
class DeviceEvent {
 public:
  explicit DeviceEvent(DeviceType device);
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  // Moves the point behind all work that is queued so far.
  void Record();
  // Returns the device's time between two recorded points. Waits until the device has reached this
  // one.
  double SecondsSince(const DeviceEvent& begin) const;

 private:
  void* event_ = nullptr;                       // of a GPU
  std::chrono::steady_clock::time_point time_;  // of the CPU
};

}  // namespace burst
