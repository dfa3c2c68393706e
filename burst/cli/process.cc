#include "burst/cli/process.h"

#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "burst/base/host_memory.h"
#include "burst/base/print_error.h"

namespace burst {
namespace {

// Within this time, a repeated signal belongs to the first one. timeout(1), launchers and
// supervisors send one request several times, and users press a key again.
constexpr int64_t kOneRequestNs = 1'000'000'000;

// These are lock-free, so a handler may use them.
std::atomic<int> received{0};
std::atomic<int64_t> received_ns{0};
std::atomic<int> stops_between_steps{0};         // number of live StopsBetweenSteps
std::atomic<bool> stopped_between_steps{false};  // whether one has ever lived
std::atomic<int> rank{0};                        // the rank of this process
std::atomic<bool> lets_others_report{false};
std::atomic<bool> output_was_closed{false};  // at the start

int64_t NowNs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

const char* NameOfSignal(int signal) {
  switch (signal) {
    case SIGINT:
      return "SIGINT";
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return "SIGHUP";
  }
}

void Say(int fd, const char* text) { (void)!write(fd, text, std::strlen(text)); }

// Handles an exception that left a thread or a destructor. Without an exception the program has a
// bug.
[[noreturn]] void EndWithException() {
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const std::exception& exception) {
    std::fflush(stdout);
    std::fprintf(stderr, "error: %s\n", Describe(exception));
    std::fflush(stderr);
    std::_Exit(kExitFailure);
  } catch (...) {
  }
  std::abort();
}

// Handles a launcher's signal. A launcher sends it to all processes, also after one of them has
// ended with an error.
void EndAtOnce(int signal) {
  if (rank.load() != 0 || lets_others_report.load()) _exit(128 + signal);
  Say(STDERR_FILENO, "error: ");
  Say(STDERR_FILENO, NameOfSignal(signal));
  Say(STDERR_FILENO, stopped_between_steps.load() ? " ended the process after its last save\n"
                                                  : " ended the process before its first step\n");
  _exit(128 + signal);
}

void OnSignal(int signal) {
  const int error = errno;
  if (stops_between_steps.load() == 0) EndAtOnce(signal);
  int first = 0;
  if (received.compare_exchange_strong(first, signal)) {
    received_ns.store(NowNs());
    if (rank.load() == 0) {
      Say(STDOUT_FILENO, "\n");
      Say(STDOUT_FILENO, NameOfSignal(signal));
      Say(STDOUT_FILENO, ": the run stops after this step; again, it ends at once\n");
    }
  } else if ((signal == first || signal == SIGINT) &&
             NowNs() - received_ns.load() > kOneRequestNs) {
    ::signal(signal, SIG_DFL);
    raise(signal);  // arrives when this handler returns
  }
  errno = error;
}

// Opens closed standard files. Otherwise the next file that the process opens would get such a
// number, and the printed text.
void OpenStandardFiles() {
  constexpr char kNowhere[] = "/dev/null";
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    if (fd == STDOUT_FILENO) output_was_closed.store(true);
    // This number is the lowest free one, because those below it are open.
    if (open(kNowhere, fd == STDIN_FILENO ? O_RDONLY : O_WRONLY) != fd) std::_Exit(kExitFailure);
  }
}

}  // namespace

int RunProgram(int (*program)(int, char**), int argc, char** argv) {
  OpenStandardFiles();
  ::signal(SIGXFSZ, SIG_IGN);  // a file at its limit (ulimit -f) is an error of its write
  std::set_new_handler([] { OutOfMemory(Describe(std::bad_alloc())); });
  std::set_terminate(EndWithException);
  try {
    return program(argc, argv);
  } catch (const std::exception& exception) {
    return ExitCode(absl::InternalError(Describe(exception)), kExitFailure);
  }
}

absl::Status FlushOutput() {
  const char* cause = nullptr;
  if (output_was_closed.load()) {
    cause = "it is closed";
  } else if (std::fflush(stdout) != 0) {
    if (errno == EPIPE) return absl::OkStatus();
    cause = std::strerror(errno);
  } else if (std::ferror(stdout) != 0) {
    cause = "an earlier write failed";
  }
  if (cause == nullptr) return absl::OkStatus();
  return absl::InternalError(std::string("standard output: must take what is printed; got: ") +
                             cause + "; lead it to a file or a pipe that does");
}

int ExitCode(const absl::Status& status, int code) {
  if (!absl::IsCancelled(status)) PrintError(status);
  return code;
}

int ExitWithOutput() {
  const absl::Status output = FlushOutput();
  return output.ok() ? 0 : ExitCode(output, kExitFailure);
}

void LetOthersReport() {
  constexpr int kSeconds = 10;
  lets_others_report.store(true);
  sleep(kSeconds);
}

int RefuseUsage(const absl::Status& error, int process) {
  if (process != 0) LetOthersReport();
  return ExitCode(error, kExitBadUsage);
}

void InstallInterruptHandler(int process) {
  rank.store(process);
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
}

StopsBetweenSteps::StopsBetweenSteps() {
  stopped_between_steps.store(true);
  ++stops_between_steps;
}

StopsBetweenSteps::~StopsBetweenSteps() { --stops_between_steps; }

int InterruptSignal() { return received.load(std::memory_order_relaxed); }

std::thread StartWithoutSignals(std::function<void()> work) {
  sigset_t requests, before;
  sigemptyset(&requests);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) sigaddset(&requests, signal);
  pthread_sigmask(SIG_BLOCK, &requests, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(work));
  } catch (const std::system_error& error) {
    OutOfMemory((std::string("no thread could be started: ") + error.what() +
                 "; raise the limit of this process's memory, or of the user's processes")
                    .c_str());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace burst
