#include "burst/comm/gpu/failure.h"

#include <chrono>
#include <cstdlib>
#include <new>
#include <string>

#include "burst/base/check.h"
#include "burst/base/print_error.h"

namespace burst {
namespace {

constexpr std::chrono::seconds kGrace{10};  // time for ranks to return after a failure
constexpr std::chrono::milliseconds kPollInterval{500};

}  // namespace

void FailureState::Fail(const absl::Status& failure) {
  BURST_CHECK(!failure.ok()) << "a failure without a reason";
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.ok()) return;
  failure_ = failure;
  failed_.store(true, std::memory_order_release);
}

absl::Status FailureState::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

FailureWatchdog::~FailureWatchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FailureWatchdog::Fail(const absl::Status& failure) {
  state_->Fail(failure);
  changed_.notify_all();
}

void FailureWatchdog::Watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!done_ && !state_->failed()) {
    changed_.wait_for(lock, kPollInterval);
    try {
      const absl::Status error = background_error_();
      if (!error.ok()) state_->Fail(error);
    } catch (const std::bad_alloc&) {  // no memory for the sentence; the next check may find some
    }
  }
  if (done_) return;
  if (free_ranks_ != nullptr) {
    lock.unlock();
    try {
      free_ranks_();
    } catch (const std::bad_alloc&) {  // the others wait until their patience ends
    }
    lock.lock();
  }
  if (!ends_process_) return;
  if (changed_.wait_for(lock, kGrace, [this] { return done_; })) return;
  PrintError(state_->failure());
  std::_Exit(1);
}

}  // namespace burst
