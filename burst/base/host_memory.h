// The memory of the machine.
#pragma once

#include <cstdint>
#include <string>

namespace burst {

// Bytes that this process can still take: what the system has to give, and no more than the limits
// of its control groups (a container's, a batch job's) leave. Caches of files count as free, and
// what no file says as no limit.
// `root`: where proc and sys are.
int64_t FreeHostMemory(const std::string& root = "/");

}  // namespace burst
