// How a program ends on an error.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

#include "absl/status/status.h"

namespace burst {

inline constexpr int kExitFailure = 1;   // something went wrong while running
inline constexpr int kExitBadUsage = 2;  // options that are unknown, invalid or contradict

// Prints the error in one sentence, unless it is Cancelled: then another rank does. Returns `code`.
inline int ExitCode(const absl::Status& status, int code) {
  if (!absl::IsCancelled(status)) {
    std::fprintf(stderr, "error: %s\n", std::string(status.message()).c_str());
  }
  return code;
}

// For a process of a launcher whose error another process prints: a launcher ends all processes
// when the first one ends, so this one waits until the other has printed.
inline void LetOthersReport() {
  constexpr int kSeconds = 10;
  sleep(kSeconds);
}

// Prints what is wrong with the options and returns kExitBadUsage. `process`: this process's rank
// among those of a launcher. All of them find the same error: process 0 prints it at once, which
// ends the others before they do.
inline int RefuseUsage(const absl::Status& error, int process) {
  if (process != 0) LetOthersReport();
  return ExitCode(error, kExitBadUsage);
}

}  // namespace burst
