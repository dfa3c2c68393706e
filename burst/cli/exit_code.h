// How a program ends on an error.
#pragma once

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

}  // namespace burst
