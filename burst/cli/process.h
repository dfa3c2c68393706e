// How a program ends: on an error, or when it is asked to stop.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/status.h"

namespace burst {

inline constexpr int kExitFailure = 1;   // something went wrong while running
inline constexpr int kExitBadUsage = 2;  // options that are unknown, invalid or contradict

// Runs the body of main and returns the result of `program`. An exception (also one that leaves a
// thread) or lack of memory on any thread ends the process with kExitFailure and a sentence. If
// standard input, output or error were closed at the start, they lead to /dev/null.
int RunProgram(int (*program)(int argc, char** argv), int argc, char** argv);

// Writes what was printed to standard output. An error where any of it was lost, also because
// standard output was closed at the start. A reader that closes its pipe has read enough.
absl::Status FlushOutput();

// Ends a program that has printed its result: returns 0, or prints the error of FlushOutput and
// returns kExitFailure.
int ExitWithOutput();

// Prints the error in one sentence and returns `code`. A Cancelled error is not printed, because
// another rank prints the cause.
int ExitCode(const absl::Status& status, int code);

// Waits until another process has printed the same error. A launcher ends all processes when the
// first one ends.
void LetOthersReport();

// Prints the error of the options and returns kExitBadUsage. `process`: this process's rank among
// those of a launcher. All of them find the same error. Process 0 prints it at once, and ends the
// others before they do.
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

// Starts a thread to which none of these signals is delivered, because handling one may wait for a
// reader of stdout.
std::thread StartWithoutSignals(std::function<void()> work);

}  // namespace burst
