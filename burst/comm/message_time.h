// Counts the time that a thread spends in communicators: it waits for messages, or copies and adds
// up what they carry. A rank does nothing else then, so no work hides that time.
#pragma once

#include <chrono>

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

}  // namespace burst
