#include "burst/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace burst {

FatalMessage::FatalMessage(const char* file, int line, const char* condition) {
  stream_ << file << ":" << line << ": check failed: " << condition << " ";
}

FatalMessage::~FatalMessage() {
  std::fprintf(stderr, "%s\n", stream_.str().c_str());
  std::abort();
}

}  // namespace burst
