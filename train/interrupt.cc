#include "train/interrupt.h"

#include <signal.h>

#include <atomic>

namespace burst {
namespace {

std::atomic<int> received{0};  // lock-free, so a handler may set it

void OnSignal(int signal) { received.store(signal, std::memory_order_relaxed); }

}  // namespace

void InstallInterruptHandler() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);  // the second one kills
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int InterruptSignal() { return received.load(std::memory_order_relaxed); }

}  // namespace burst
