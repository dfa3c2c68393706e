// Runs a fuzz target under libFuzzer. BURST_FUZZ_CPU_SECONDS in the environment ends the run after
// this processor time, which libFuzzer's own -max_total_time does not measure.
#include <signal.h>
#include <sys/time.h>

#include <cstdlib>

#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  const char* seconds = std::getenv("BURST_FUZZ_CPU_SECONDS");
  if (seconds == nullptr) return 0;
  signal(SIGPROF, [](int) { raise(SIGINT); });  // libFuzzer prints its figures and ends
  itimerval timer = {};
  timer.it_value.tv_sec = std::atol(seconds);
  setitimer(ITIMER_PROF, &timer, nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  burst::FuzzOne(data, size);
  return 0;
}
