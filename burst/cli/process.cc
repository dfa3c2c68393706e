#include "burst/cli/process.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <string>

namespace burst {
namespace {

std::atomic<int> received{0};  // lock-free, so a handler may set it

void OnSignal(int signal) { received.store(signal, std::memory_order_relaxed); }

}  // namespace

int ExitCode(const absl::Status& status, int code) {
  if (!absl::IsCancelled(status)) {
    std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  }
  return code;
}

void LetOthersReport() {
  constexpr int kSeconds = 10;
  sleep(kSeconds);
}

int RefuseUsage(const absl::Status& error, int process) {
  if (process != 0) LetOthersReport();
  return ExitCode(error, kExitBadUsage);
}

void InstallInterruptHandler() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);  // the second one kills
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int InterruptSignal() { return received.load(std::memory_order_relaxed); }

}  // namespace burst
