// How a program ends: on an error, or when it is asked to stop.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace burst {

inline constexpr int kExitFailure = 1;   // something went wrong while running
inline constexpr int kExitBadUsage = 2;  // options that are unknown, invalid or contradict

// The body of main: what `program` returns. An exception, also one that leaves a thread, and memory
// that runs out on any thread end the process with kExitFailure and a sentence. Standard input,
// output and error that the process was started without lead to /dev/null.
int RunProgram(int (*program)(int argc, char** argv), int argc, char** argv);

// Prints the error in one sentence, unless it is Cancelled: then another rank does. Returns `code`.
int ExitCode(const absl::Status& status, int code);

// For a process of a launcher whose error another process prints: a launcher ends all processes
// when the first one ends, so this one waits until the other has printed.
void LetOthersReport();

// Prints what is wrong with the options and returns kExitBadUsage. `process`: this process's rank
// among those of a launcher. All of them find the same error: process 0 prints it at once, which
// ends the others before they do.
int RefuseUsage(const absl::Status& error, int process);

// Signals that ask a program to stop: Ctrl-C (SIGINT), SIGTERM, SIGUSR1 and, unless nohup turned it
// off, SIGHUP. Launchers and batch systems send them some time before they kill.
//
// After the call, such a signal ends the process at once with 128 + its number and a message. While
// a StopsBetweenSteps lives, the signal only asks, and InterruptSignal() returns it. A second
// request then ends the process at once: the same signal again, or Ctrl-C at least a second after
// another signal. Any other second signal is ignored, because launchers send SIGTERM after their
// first signal.
//
// A reader that closes the pipe of stdout or stderr does not end the program either. `process`:
// its rank among those of a launcher; 0 prints that it was asked.
void InstallInterruptHandler(int process);

class StopsBetweenSteps {
 public:
  StopsBetweenSteps();
  ~StopsBetweenSteps();
  StopsBetweenSteps(const StopsBetweenSteps&) = delete;
  StopsBetweenSteps& operator=(const StopsBetweenSteps&) = delete;
};

// The signal that asked the process to stop; 0 while none has.
int InterruptSignal();

// A thread to which none of these signals is delivered: handling one may wait for a reader of
// stdout.
std::thread StartWithoutSignals(std::function<void()> work);

}  // namespace burst
