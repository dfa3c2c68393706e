#include "train/pipeline/pass_times.h"

namespace burst {

void PassTimes::Begin() {
  if (passes_ == events_.size()) events_.push_back(std::make_unique<Pass>(device_));
  events_[passes_++]->begin.Record();
}

void PassTimes::End() { events_[passes_ - 1]->end.Record(); }

double PassTimes::Busy() const {
  double seconds = 0;
  for (size_t i = 0; i < passes_; ++i) seconds += events_[i]->end.SecondsSince(events_[i]->begin);
  return seconds;
}

double PassTimes::Span() const {
  return passes_ == 0 ? 0 : events_[passes_ - 1]->end.SecondsSince(events_[0]->begin);
}

}  // namespace burst
