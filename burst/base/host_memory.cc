#include "burst/base/host_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <tuple>

#include "burst/base/check.h"

namespace burst {
namespace {

// Returns the number after a word in a file, such as "MemAvailable: 123". With an empty word it
// returns the file's first number.
std::optional<int64_t> NumberIn(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  std::string next;
  while (!word.empty() && file >> next && next != word) {
  }
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;  // also for "max"
}

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// Returns the bytes that a control group's limit leaves; version 2 first, then version 1.
int64_t LeftInGroup(const std::string& folder) {
  for (const auto& [limit_name, used_name, of_all] :
       {std::tuple("memory.max", "memory.current", ""),
        std::tuple("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}) {
    const std::optional<int64_t> limit = NumberIn(folder + limit_name, "");
    const std::optional<int64_t> used = NumberIn(folder + used_name, "");
    if (!limit.has_value() || !used.has_value()) continue;
    int64_t caches = 0;
    for (const char* const cache : {"inactive_file", "active_file"}) {
      caches += NumberIn(folder + "memory.stat", std::string(of_all) + cache).value_or(0);
    }
    return std::max<int64_t>(0, *limit - (*used - caches));
  }
  return kNoLimit;
}

// Returns the bytes that this process's limit of addresses leaves (ulimit -v).
int64_t LeftOfLimit(const std::string& root) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  const int64_t pages = NumberIn(root + "proc/self/statm", "").value_or(0);
  const int64_t used = pages * sysconf(_SC_PAGESIZE);
  return std::max<int64_t>(0, static_cast<int64_t>(limit.rlim_cur) - used);
}

}  // namespace

int64_t FreeHostMemory(const std::string& root) {
  constexpr int64_t kKiB = 1024;
  const std::optional<int64_t> available = NumberIn(root + "proc/meminfo", "MemAvailable:");
  int64_t free = available.has_value() ? kKiB * *available : kNoLimit;
  // The loop visits this process's groups, "0::/user.slice/job" and "4:memory:/job", and their
  // parents.
  std::ifstream groups(root + "proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers.find("memory") == std::string::npos) continue;
    const std::string mount =
        root + (controllers.empty() ? "sys/fs/cgroup" : "sys/fs/cgroup/memory");
    std::string group = line.substr(second + 1);
    while (true) {
      free = std::min(free, LeftInGroup(mount + (group == "/" ? "" : group) + "/"));
      const size_t parent = group.rfind('/');
      if (parent == std::string::npos || group == "/") break;
      group = parent == 0 ? "/" : group.substr(0, parent);
    }
  }
  return std::min(free, LeftOfLimit(root));
}

void OutOfMemory(const char* message) {
  if (ScopedFatalErrors::active()) throw FatalError(message, /*out_of_memory=*/true);
  static std::atomic<bool> ending{false};
  while (ending.exchange(true)) pause();  // another thread prints its sentence
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", message);
  std::fflush(stderr);
  std::_Exit(1);
}

const char* Describe(const std::exception& exception) {
  const bool out_of_memory = dynamic_cast<const std::bad_alloc*>(&exception) != nullptr;
  return out_of_memory ? "out of memory: the system, or a limit, leaves this process no more"
                       : exception.what();
}

bool HasMemoryForThread() {
  constexpr size_t kBytes = 16 << 10;
  void* volatile const memory = std::malloc(kBytes);
  std::free(memory);
  return memory != nullptr;
}

}  // namespace burst
