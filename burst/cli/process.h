// How a program ends: on an error, or when it is asked to stop.
#pragma once

#include "absl/status/status.h"

namespace burst {

inline constexpr int kExitFailure = 1;   // something went wrong while running
inline constexpr int kExitBadUsage = 2;  // options that are unknown, invalid or contradict

// Prints the error in one sentence, unless it is Cancelled: then another rank does. Returns `code`.
int ExitCode(const absl::Status& status, int code);

// For a process of a launcher whose error another process prints: a launcher ends all processes
// when the first one ends, so this one waits until the other has printed.
void LetOthersReport();

// Prints what is wrong with the options and returns kExitBadUsage. `process`: this process's rank
// among those of a launcher. All of them find the same error: process 0 prints it at once, which
// ends the others before they do.
int RefuseUsage(const absl::Status& error, int process);

// Ctrl-C and SIGTERM. Asked once, a run stops after its step, with a checkpoint; asked twice, the
// process ends at once.
void InstallInterruptHandler();

// The signal that asked the process to stop; 0 while none has.
int InterruptSignal();

}  // namespace burst
