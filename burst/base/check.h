// BURST_CHECK: invariants and shapes inside the library. A failed check is a bug in the program,
// so it prints where and why and aborts. Errors that a user can cause are an absl::Status instead.
#pragma once

#include <sstream>

namespace burst {

// Collects a message, then prints it with its place and aborts when destroyed.
class FatalMessage {
 public:
  FatalMessage(const char* file, int line, const char* condition);
  [[noreturn]] ~FatalMessage();
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
