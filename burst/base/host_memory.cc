#include "burst/base/host_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <tuple>

namespace burst {
namespace {

// The number after a word of a file, such as "MemAvailable: 123"; an empty word: its first one.
std::optional<int64_t> NumberIn(const std::string& path, const std::string& word) {
  std::ifstream file(path);
  std::string next;
  while (!word.empty() && file >> next && next != word) {
  }
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;  // "max", too
}

// What a control group's limit leaves; version 2, then 1.
int64_t LeftInGroup(const std::string& folder) {
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  for (const auto& [limit_name, used_name, cache_name] :
       {std::tuple("memory.max", "memory.current", "inactive_file"),
        std::tuple("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}) {
    const std::optional<int64_t> limit = NumberIn(folder + limit_name, "");
    const std::optional<int64_t> used = NumberIn(folder + used_name, "");
    if (!limit.has_value() || !used.has_value()) continue;
    const int64_t cache = NumberIn(folder + "memory.stat", cache_name).value_or(0);
    return std::max<int64_t>(0, *limit - (*used - cache));
  }
  return kNoLimit;
}

}  // namespace

int64_t FreeHostMemory(const std::string& root) {
  constexpr int64_t kKiB = 1024;
  int64_t free = kKiB * NumberIn(root + "proc/meminfo", "MemAvailable:").value_or(0);
  // This process's groups, "0::/user.slice/job" and "4:memory:/job", and those that they are in.
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
  return free;
}

}  // namespace burst
