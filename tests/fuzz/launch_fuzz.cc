// Reads the environment of launchers, lines NAME=value. The result is a launch whose numbers fit
// together, or an error. It also reads Slurm's lists of hosts.
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "burst/base/check.h"
#include "burst/comm/launch/process_launch.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace burst {

void FuzzOne(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  std::map<std::string, std::string> variables;
  while (!input.empty()) {
    const std::string line = input.TextUntil('\n');
    const size_t equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
    BURST_CHECK(FirstHost(line).size() <= line.size()) << line;
  }
  const auto variable = [&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
  const auto found = DetectProcessLaunch(variable);
  if (!found.ok()) {
    BURST_CHECK(absl::IsInvalidArgument(found.status())) << found.status().ToString();
    BURST_CHECK(!found.status().message().empty());
    return;
  }
  if (!found->has_value()) return;
  const ProcessLaunch& launch = **found;
  BURST_CHECK(0 <= launch.rank && launch.rank < launch.world_size);
  BURST_CHECK(0 <= launch.local_rank && launch.local_rank < launch.world_size);
  BURST_CHECK(launch.local_size == 0 || launch.local_rank < launch.local_size);
  BURST_CHECK(launch.local_size <= launch.world_size);
  BURST_CHECK(1 <= launch.port && launch.port <= 65535) << launch.port;
  BURST_CHECK(!launch.address.empty() && !launch.launcher.empty());
}

}  // namespace burst
