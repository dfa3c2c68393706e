// Measures spans of a device's time, such as the passes of a pipeline's stage or the waits for
// messages.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <vector>

#include "burst/device/device.h"
#include "burst/device/event.h"

namespace burst {

// Times spans of a rank's work, one after the other, by its device's clock. On a GPU the times are
// points in its stream, so the host waits only when a caller asks for a time. For one thread.
class DeviceSpans {
 public:
  // `most`: the most spans that are measured until Clear. Each takes two events of a GPU.
  explicit DeviceSpans(DeviceType device, size_t most = std::numeric_limits<size_t>::max())
      : device_(device), most_(most) {}

  // Forgets all spans; the events are used again.
  void Clear() { spans_ = 0; }
  // Begins and ends the next span, behind all work that is queued so far.
  void Begin();
  void End();

  // Returns whether there were at most `most` spans, so that all are measured.
  bool complete() const { return spans_ <= most_; }
  // Returns the seconds of all spans together. Waits for the device.
  double Busy() const;
  // Returns the seconds from the begin of the first span to the end of the last one.
  double Span() const;

 private:
  struct Pair {
    explicit Pair(DeviceType device) : begin(device), end(device) {}
    DeviceEvent begin, end;
  };

  size_t measured() const { return spans_ < most_ ? spans_ : most_; }

  const DeviceType device_;
  const size_t most_;
  std::vector<std::unique_ptr<Pair>> events_;  // for the most spans that there ever were
  size_t spans_ = 0;                           // since Clear
};

}  // namespace burst
