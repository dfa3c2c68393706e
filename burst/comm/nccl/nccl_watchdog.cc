#include "burst/comm/nccl/nccl_watchdog.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"

namespace burst {
namespace {

constexpr std::chrono::seconds kGrace{10};  // for ranks to come back after a failure
constexpr std::chrono::milliseconds kPollInterval{500};

}  // namespace

void NcclWatchdog::Watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!done_ && !world_->failed()) {
    changed_.wait_for(lock, kPollInterval);
    const absl::Status error = world_->AsyncError();
    if (!error.ok()) world_->Fail(error);
  }
  if (done_) return;
  if (free_threads_) {
    lock.unlock();
    world_->AbortLinks();
    lock.lock();
  }
  if (changed_.wait_for(lock, kGrace, [this] { return done_; })) return;
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", std::string(world_->failure().message()).c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

}  // namespace burst
