// Measures how a stage of a pipeline spends a step: it computes passes, and waits between them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "burst/device/device.h"
#include "burst/device/event.h"

namespace burst {

// Times the passes of one step on one rank, by its device's clock. On a GPU the times are points in
// its stream, so the host waits only when a caller asks for a time. For one thread.
class PassTimes {
 public:
  explicit PassTimes(DeviceType device) : device_(device) {}

  // Forgets all passes; the events are used again.
  void Clear() { passes_ = 0; }
  // Measures the next pass, from the arrival of its inputs until its result can be sent.
  void Begin();
  void End();

  // Returns the seconds of all passes together. Waits for the device.
  double Busy() const;
  // Returns the seconds from the begin of the first pass to the end of the last one.
  double Span() const;

 private:
  struct Pass {
    explicit Pass(DeviceType device) : begin(device), end(device) {}
    DeviceEvent begin, end;
  };

  const DeviceType device_;
  std::vector<std::unique_ptr<Pass>> events_;  // for the most passes that a step ever had
  size_t passes_ = 0;                          // the number in use
};

}  // namespace burst
