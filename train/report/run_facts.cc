#include "train/report/run_facts.h"

#include <filesystem>

#include "absl/status/statusor.h"
#include "burst/base/json.h"
#include "burst/cli/files.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

std::string PathIn(const std::string& folder) {
  return (std::filesystem::path(folder) / kRunFacts).string();
}

}  // namespace

absl::Status WriteRunFacts(const std::string& folder, const RunFacts& facts) {
  const Json json = {{"flops_per_token", facts.flops_per_token},
                     {"peak_flops", facts.peak_flops},
                     {"planned", facts.planned},
                     {"peak_bytes", facts.peak_bytes},
                     {"seconds", facts.seconds},
                     {"sample", facts.sample}};
  return WriteFileAtomically(PathIn(folder),
                             json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

RunFacts ReadRunFacts(const std::string& folder) {
  const absl::StatusOr<std::string> text = ReadFile(PathIn(folder));
  const absl::StatusOr<Json> json = text.ok() ? ParseJson<Json>(*text) : text.status();
  RunFacts facts;
  if (!json.ok() || !json->is_object()) return facts;
  const auto number = [&](const char* name) {
    const Json value = json->value(name, Json());
    return value.is_number() ? value.get<double>() : 0;
  };
  const auto words = [&](const char* name) {
    const Json value = json->value(name, Json());
    return value.is_string() ? value.get<std::string>() : "";
  };
  facts.flops_per_token = number("flops_per_token");
  facts.peak_flops = number("peak_flops");
  facts.planned = words("planned");
  facts.peak_bytes = static_cast<int64_t>(number("peak_bytes"));
  facts.seconds = number("seconds");
  facts.sample = words("sample");
  return facts;
}

}  // namespace burst
