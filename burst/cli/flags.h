// Command lines and configuration files onto abseil flags. One parser for both, so that errors read
// alike, name the option, and are printed by one rank only.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace burst {

// Flags of one subject, in the order --help lists them. Only flags in a group are accepted.
struct FlagGroup {
  const char* title;
  std::vector<const char*> flags;
};

// Sets a flag from its text. InvalidArgument naming the flag; for an unknown one, with the nearest
// that exists.
absl::Status SetFlag(const std::vector<FlagGroup>& groups, const std::string& name,
                     absl::string_view text);

// Applies --name=value, --name value, --flag and --noflag, in order; there are no positional
// arguments.
absl::Status ParseArguments(const std::vector<FlagGroup>& groups, int argc, char** argv);

// Applies a JSON object whose keys are flag names.
absl::Status ParseConfigFile(const std::vector<FlagGroup>& groups, const std::string& path);

bool WantsHelp(int argc, char** argv);
std::string HelpText(absl::string_view introduction, const std::vector<FlagGroup>& groups);

}  // namespace burst
