// Counts the time that messages take from a rank, because no work hides it. On a CPU a rank's
// thread spends it in communicators: it waits for messages, or copies and adds up what they carry.
// On a GPU the thread's stream waits for messages on other streams.
#pragma once

#include <chrono>

#include "burst/device/device_spans.h"

namespace burst {

// Counts its life's time, unless the thread has an older one alive.
class ScopedMessageTime {
 public:
  ScopedMessageTime() {
    if (depth_++ == 0) begin_ = Clock::now();
  }
  ~ScopedMessageTime() {
    if (--depth_ == 0) total_ += Clock::now() - begin_;
  }
  ScopedMessageTime(const ScopedMessageTime&) = delete;
  ScopedMessageTime& operator=(const ScopedMessageTime&) = delete;

  // Returns the seconds that the calling thread has counted so far.
  static double Seconds() { return std::chrono::duration<double>(total_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  static inline thread_local int depth_ = 0;
  static inline thread_local Clock::duration total_{};
  Clock::time_point begin_;
};

// While it lives, the waits of the calling thread's stream for messages are added to `spans`. They
// are not measured otherwise.
class ScopedStreamWaits {
 public:
  explicit ScopedStreamWaits(DeviceSpans* spans) : before_(spans_) { spans_ = spans; }
  ~ScopedStreamWaits() { spans_ = before_; }
  ScopedStreamWaits(const ScopedStreamWaits&) = delete;
  ScopedStreamWaits& operator=(const ScopedStreamWaits&) = delete;

  // A communicator calls these before and after it makes the thread's stream wait.
  static void Begin() {
    if (spans_ != nullptr) spans_->Begin();
  }
  static void End() {
    if (spans_ != nullptr) spans_->End();
  }

 private:
  static inline thread_local DeviceSpans* spans_ = nullptr;
  DeviceSpans* const before_;
};

}  // namespace burst
