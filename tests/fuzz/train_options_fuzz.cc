// Reads options of //train: arguments (separated by newlines) and a JSON file of options, from any
// text. Accepted options print as JSON that gives the same options. ResolveConfig then gives a
// configuration with a learning rate for every step, or an error that names an option.
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "burst/base/check.h"
#include "burst/base/json.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "train/config/config.h"

namespace burst {
namespace {

// Picks a launch: alone, with GPUs, or by mpirun on several hosts.
Launch PickLaunch(FuzzInput* input) {
  Launch launch;
  launch.cores = static_cast<int>(input->Integer(1, 64));
  if (input->Bool()) launch.gpus = static_cast<int>(input->Integer(1, 8));
  if (input->Bool()) {
    launch.launcher = "mpirun";
    launch.processes = static_cast<int>(input->Integer(2, 16));
    launch.ranks_per_node = static_cast<int>(input->Integer(0, 8));
  }
  return launch;
}

void CheckError(const absl::Status& status) {
  BURST_CHECK(absl::IsInvalidArgument(status)) << status.ToString();
  BURST_CHECK(!status.message().empty());
}

std::vector<std::string> Values(const OptionTable& options) {
  std::vector<std::string> values;
  for (const Option& option : options.options()) {
    values.push_back(option.on_resume == OnResume::kNotSaved ? option.initial : option.get());
  }
  return values;
}

bool IsJsonObject(const std::string& text) {
  const auto json = ParseJson(text);
  return json.ok() && json->is_object();
}

// Checks that printed JSON reads as the same values. JSON cannot hold text that is not UTF-8.
void CheckRoundTrip(const OptionTable& options) {
  const std::string json = options.ToJson();
  if (absl::StrContains(json, "\xEF\xBF\xBD")) return;  // the replacement character
  TrainConfig other;
  OptionTable again = TrainOptions(&other);
  const absl::Status status = again.ParseJson(json);
  BURST_CHECK(status.ok()) << status.message() << " in " << json;
  BURST_CHECK_EQ(again.ToJson(), json);
  const std::vector<std::string> before = Values(options), after = Values(again);
  for (size_t i = 0; i < before.size(); ++i) {
    // A JSON object inside a text loses its spaces.
    BURST_CHECK(before[i] == after[i] || IsJsonObject(before[i]))
        << before[i] << " became " << after[i];
  }
}

void CheckResolved(const TrainConfig& config, const Launch& launch) {
  const absl::StatusOr<ResolvedConfig> resolved = ResolveConfig(config, launch);
  if (!resolved.ok()) {
    CheckError(resolved.status());
    BURST_CHECK(absl::StartsWith(resolved.status().message(), "--"))
        << "names no option: " << resolved.status().message();
    return;
  }
  const ResolvedConfig& c = *resolved;
  BURST_CHECK(c.ranks >= 1 && c.threads >= 1 && c.batch % c.mesh.data == 0);
  BURST_CHECK_EQ(c.mesh.world_size(), c.ranks);
  BURST_CHECK(c.ulysses >= 1 && c.mesh.sequence % c.ulysses == 0);
  BURST_CHECK(c.ranks_per_node >= 0 &&
              (c.ranks_per_node == 0 || c.mesh.sequence % c.ranks_per_node == 0));
  BURST_CHECK(c.model.Validate().ok());
  for (int64_t step : {int64_t{0}, int64_t{1}, c.steps / 2, c.steps - 1}) {
    const double lr = c.lr(step);
    BURST_CHECK(std::isfinite(lr) && lr >= 0) << lr << " in step " << step << " of " << c.steps;
  }
  BURST_CHECK(c.CheckResume(c.ToJson()).ok()) << "a run differs from itself: " << c.ToJson();
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const Launch launch = PickLaunch(&input);
  const bool is_json = input.Bool();
  TrainConfig config;
  OptionTable options = TrainOptions(&config);
  absl::Status status;
  if (is_json) {
    status = options.ParseJson(input.Rest());
  } else {
    std::vector<std::string> arguments = {"train"};
    while (!input.empty()) arguments.push_back(input.TextUntil('\n').c_str());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    status = options.ParseArguments(static_cast<int>(argv.size()), argv.data());
  }
  if (!status.ok()) return CheckError(status);
  CheckRoundTrip(options);
  // The target does not open the files that options name.
  if (config.model.empty() || config.model[0] != '{') config.model = "llama_tiny";
  CheckResolved(config, launch);
}

}  // namespace burst
