// Shows the progress of reading data: a bar on a terminal, elsewhere a line now and then, and
// nothing if it takes only a moment.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace burst {

class Progress {
 public:
  // `what` is a text such as "Encoding text.txt". `total` is the sum of the amounts to add.
  Progress(std::string what, int64_t total);
  ~Progress();

  // Adds an amount, on any thread.
  void Add(int64_t amount);

 private:
  using Clock = std::chrono::steady_clock;
  void Print(Clock::time_point now, bool last);

  const std::string what_;
  const int64_t total_;
  const bool is_terminal_;
  const Clock::time_point start_;
  std::mutex mutex_;
  int64_t done_ = 0;
  Clock::time_point next_;  // the time of the next print
  bool printed_ = false;
};

}  // namespace burst
