#include "burst/device/device_spans.h"

namespace burst {

void DeviceSpans::Begin() {
  if (++spans_ > most_) return;
  if (spans_ > events_.size()) events_.push_back(std::make_unique<Pair>(device_));
  events_[spans_ - 1]->begin.Record();
}

void DeviceSpans::End() {
  if (complete()) events_[spans_ - 1]->end.Record();
}

double DeviceSpans::Busy() const {
  double seconds = 0;
  for (size_t i = 0; i < measured(); ++i)
    seconds += events_[i]->end.SecondsSince(events_[i]->begin);
  return seconds;
}

double DeviceSpans::Span() const {
  return measured() == 0 ? 0 : events_[measured() - 1]->end.SecondsSince(events_[0]->begin);
}

}  // namespace burst
