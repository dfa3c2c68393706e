#include "train/data/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_format.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

constexpr auto kMoment = std::chrono::seconds(1);
constexpr auto kBetweenBars = std::chrono::milliseconds(100);
constexpr auto kBetweenLines = std::chrono::seconds(10);

}  // namespace

Progress::Progress(std::string what, int64_t total)
    : what_(std::move(what)),
      total_(std::max<int64_t>(1, total)),
      is_terminal_(isatty(STDOUT_FILENO) != 0),
      start_(Clock::now()),
      next_(start_ + kMoment) {}

Progress::~Progress() {
  if (printed_) Print(Clock::now(), /*last=*/true);
}

void Progress::Add(int64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ += amount;
  const Clock::time_point now = Clock::now();
  if (now < next_) return;
  next_ = now + (is_terminal_ ? Clock::duration(kBetweenBars) : Clock::duration(kBetweenLines));
  Print(now, /*last=*/false);
}

void Progress::Print(Clock::time_point now, bool last) {
  constexpr int kWidth = 30;
  const double share =
      std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 1e-6, 1.0);
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const int filled = static_cast<int>(share * kWidth);
  std::string line = absl::StrFormat(
      "%s  [%s%s] %3.0f%%  %s", what_, std::string(filled, '#'), std::string(kWidth - filled, '.'),
      100 * share,
      last ? "in " + ShortDuration(seconds) : "left " + ShortDuration(seconds / share - seconds));
  if (is_terminal_) {
    std::printf("\r\033[K%s%s", line.c_str(), last ? "\n" : "");
  } else {
    std::printf("%s\n", line.c_str());
  }
  std::fflush(stdout);
  printed_ = true;
}

}  // namespace burst
