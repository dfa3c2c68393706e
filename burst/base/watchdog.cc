#include "burst/base/watchdog.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "burst/base/progress.h"

namespace burst {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Bounds of the time between two checks.
constexpr milliseconds kShortest{20}, kLongest{1000};
// Bounds of the time in which the other processes report. A launcher ends all processes when the
// first one ends.
constexpr milliseconds kLeastGrace{1000}, kMostGrace{10000};

constexpr int64_t kNever = INT64_MAX;
std::atomic<int64_t> idle_ms{0};            // idle time of this process
std::atomic<int64_t> elsewhere_ms{kNever};  // the least that others told since the last check
std::atomic<bool> reported{false};

std::mutex ask_mutex;
std::function<void()>& Ask() {
  static auto* ask = new std::function<void()>;
  return *ask;
}

}  // namespace

Watchdog::Watchdog(milliseconds patience) : patience_(patience) {
  SetProgressIsWatched(true);
  thread_ = std::thread([this] { Watch(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  thread_.join();
  SetProgressIsWatched(false);
  idle_ms.store(0);
}

void Watchdog::Watch() {
  const milliseconds interval = std::clamp(patience_ / 20, kShortest, kLongest);
  int64_t own = 0, world = 0;  // milliseconds without progress
  uint64_t seen = 0;
  auto last = steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, interval, [this] { return done_; })) {
    const auto now = steady_clock::now();
    // If more time has passed, this process and its ranks were not running.
    const milliseconds passed = std::min(duration_cast<milliseconds>(now - last), 4 * interval);
    last = now;
    const uint64_t count = CountProgress();
    const bool moved = count != seen || RanksInProgress() == 0;
    seen = count;
    own = moved ? 0 : own + passed.count();
    idle_ms.store(own);
    world = std::min({own, world + passed.count(), elsewhere_ms.exchange(kNever)});
    if (world >= patience_.count()) End();
  }
}

void Watchdog::End() {
  std::fflush(stdout);
  std::fprintf(stderr, "error: no rank has made progress for %.0f s (--patience)\n",
               static_cast<double>(patience_.count()) / 1000);
  ReportProgress();
  {
    std::lock_guard<std::mutex> lock(ask_mutex);
    if (Ask() != nullptr) Ask()();
  }
  std::this_thread::sleep_for(std::clamp(patience_ / 4, kLeastGrace, kMostGrace));
  std::_Exit(1);
}

int64_t MsWithoutProgress() { return idle_ms.load(); }

void ProgressElsewhere(int64_t ms_ago) {
  int64_t least = elsewhere_ms.load();
  while (ms_ago < least && !elsewhere_ms.compare_exchange_weak(least, ms_ago)) {
  }
}

void ReportProgress() {
  if (reported.exchange(true)) return;
  std::string text;
  for (const std::string& line : DescribeProgress()) text += "  " + line + "\n";
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

void SetAskOthersToReport(std::function<void()> ask) {
  std::lock_guard<std::mutex> lock(ask_mutex);
  Ask() = std::move(ask);
}

}  // namespace burst
