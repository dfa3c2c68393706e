#include "train/checkpoint/background_task.h"

#include <exception>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/host_memory.h"
#include "burst/cli/process.h"

namespace burst {

BackgroundTask::~BackgroundTask() { Wait().IgnoreError(); }

void BackgroundTask::Start(std::function<absl::Status()> task) {
  BURST_CHECK(!started()) << "the task before has not been waited for";
  started_ = true;
  busy_.store(true);
  thread_ = StartWithoutSignals([this, task = std::move(task)] {
    try {
      result_ = task();
    } catch (const std::exception& exception) {
      result_ = absl::InternalError(Describe(exception));
    }
    busy_.store(false);
  });
}

void BackgroundTask::Finish() {
  if (thread_.joinable()) thread_.join();
}

absl::Status BackgroundTask::Wait() {
  Finish();
  started_ = false;
  return std::exchange(result_, absl::OkStatus());
}

}  // namespace burst
