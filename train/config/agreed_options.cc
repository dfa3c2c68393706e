#include "train/config/agreed_options.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "burst/base/version.h"
#include "burst/comm/launch/process_launch.h"

namespace burst {

std::vector<AgreedItem> AgreedOptions(const OptionTable& options, bool one_host) {
  std::vector<AgreedItem> items = {{"the version of Burst", kVersion}};
  for (const Option& option : options.options()) {
    const bool compared = option.scope == Scope::kJob || (option.scope == Scope::kHost && one_host);
    if (compared) items.push_back({absl::StrCat("--", option.name), option.get()});
  }
  return items;
}

bool LaunchIsOnOneHost() {
  const auto launch = DetectProcessLaunch(std::getenv);
  return launch.ok() && launch->has_value() && !(*launch)->several_hosts;
}

}  // namespace burst
