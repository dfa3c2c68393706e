#include "burst/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace burst {
namespace {

thread_local bool fatal_errors = false;

}  // namespace

ScopedFatalErrors::ScopedFatalErrors() : outer_(fatal_errors) { fatal_errors = true; }
ScopedFatalErrors::~ScopedFatalErrors() { fatal_errors = outer_; }
bool ScopedFatalErrors::active() { return fatal_errors; }

FatalMessage::FatalMessage(const char* file, int line, const char* condition) {
  stream_ << file << ":" << line << ": check failed: " << condition << " ";
}

FatalMessage::~FatalMessage() noexcept(false) {
  if (fatal_errors) throw FatalError(stream_.str());
  std::fprintf(stderr, "%s\n", stream_.str().c_str());
  std::abort();
}

}  // namespace burst
