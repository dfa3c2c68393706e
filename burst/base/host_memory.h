// The memory of the machine.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace burst {

// Returns the bytes that this process can still allocate. It is the system's free memory, within
// the limits of its control groups (container, batch job) and of ulimit -v. The page cache counts
// as free. A limit that no file states counts as unlimited. `root`: where proc and sys are.
int64_t FreeHostMemory(const std::string& root = "/");

// Ends the program with exit code 1 and "error: `message`", from any thread; under
// ScopedFatalErrors (check.h) throws a FatalError of memory instead. Allocates nothing before.
[[noreturn]] void OutOfMemory(const char* message);

// Returns the exception's message, or for std::bad_alloc, whose message is useless, that memory ran
// out.
const char* Describe(const std::exception& exception);

// Returns whether a thread's first call into a library can allocate its thread-local variables. The
// C library ends the process if it cannot.
bool HasMemoryForThread();

}  // namespace burst
