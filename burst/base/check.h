// BURST_CHECK checks invariants and shapes inside the library. A failed check is a bug in the
// program: it prints where and why, and aborts. Errors that a user can cause are an absl::Status.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace burst {

// Lets a library inside another program, such as burst/c, fail without ending that program. While
// the object lives, a failure of this thread throws a FatalError instead of ending the program. The
// work in progress is left as it is and cannot be continued.
class ScopedFatalErrors {
 public:
  ScopedFatalErrors();
  ~ScopedFatalErrors();
  ScopedFatalErrors(const ScopedFatalErrors&) = delete;
  ScopedFatalErrors& operator=(const ScopedFatalErrors&) = delete;

  static bool active();  // on the calling thread

 private:
  const bool outer_;
};

class FatalError : public std::runtime_error {
 public:
  explicit FatalError(const std::string& message, bool out_of_memory = false)
      : std::runtime_error(message), out_of_memory(out_of_memory) {}
  const bool out_of_memory;
};

// Collects a message, then prints it with its place and aborts (or throws) when destroyed.
class FatalMessage {
 public:
  FatalMessage(const char* file, int line, const char* condition);
  [[noreturn]] ~FatalMessage() noexcept(false);
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

}  // namespace burst

#define BURST_CHECK(condition) \
  if (condition) {             \
  } else                       \
    ::burst::FatalMessage(__FILE__, __LINE__, #condition).stream()

#define BURST_CHECK_OP_(a, b, op)                                         \
  if ((a)op(b)) {                                                         \
  } else                                                                  \
    ::burst::FatalMessage(__FILE__, __LINE__, #a " " #op " " #b).stream() \
        << "(" << (a) << " against " << (b) << ") "

#define BURST_CHECK_EQ(a, b) BURST_CHECK_OP_(a, b, ==)
#define BURST_CHECK_NE(a, b) BURST_CHECK_OP_(a, b, !=)
#define BURST_CHECK_LE(a, b) BURST_CHECK_OP_(a, b, <=)
#define BURST_CHECK_LT(a, b) BURST_CHECK_OP_(a, b, <)
#define BURST_CHECK_GE(a, b) BURST_CHECK_OP_(a, b, >=)
#define BURST_CHECK_GT(a, b) BURST_CHECK_OP_(a, b, >)
