// Measures how a stage of a pipeline spends a step: it computes passes, and waits between them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "burst/device/device.h"
#include "burst/device/event.h"

namespace burst {

// The passes of one step on one rank, by its device's clock. On a GPU the times are points in its
// stream, so the host waits only when a time is asked for. Belongs to one thread.
class PassTimes {
 public:
  explicit PassTimes(DeviceType device) : device_(device) {}

  // Forgets all passes; the events are used again.
  void Clear() { passes_ = 0; }
  // Measures the next pass, from the arrival of its inputs until its result can be sent.
  void Begin();
  void End();

  // Seconds, summed over all passes; waits until the device is there.
  double Busy() const;
  // From the begin of the first pass to the end of the last one.
  double Span() const;

 private:
  struct Pass {
    explicit Pass(DeviceType device) : begin(device), end(device) {}
    DeviceEvent begin, end;
  };

  const DeviceType device_;
  std::vector<std::unique_ptr<Pass>> events_;  // as many as a step ever had
  size_t passes_ = 0;                          // of them in use
};

}  // namespace burst
