// The memory of the machine.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace burst {

// Bytes that this process can still take: what the system has to give, within the limits of its
// control groups (a container's, a batch job's) and of ulimit -v. Caches of files count as free,
// and what no file says as no limit. `root`: where proc and sys are.
int64_t FreeHostMemory(const std::string& root = "/");

// Ends the program with exit code 1 and "error: `message`", from any thread; under
// ScopedFatalErrors (check.h) throws a FatalError of memory instead. Allocates nothing before.
[[noreturn]] void OutOfMemory(const char* message);

// What an exception says; of std::bad_alloc, which says nothing, that memory ran out.
const char* Describe(const std::exception& exception);

// Whether there is memory for what a thread allocates at its first call into a library: the C
// library ends the process where its thread-local variables find none.
bool HasMemoryForThread();

}  // namespace burst
