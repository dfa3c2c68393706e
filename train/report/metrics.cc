#include "train/report/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

std::string ToLine(const StepMetrics& row) {
  Json json = {{"step", row.step},           {"tokens", row.tokens},
               {"loss", row.loss},           {"lr", row.lr},
               {"grad_norm", row.grad_norm}, {"tokens_per_second", row.tokens_per_second},
               {"step_ms", row.step_ms}};
  if (row.val_loss.has_value()) json["val_loss"] = *row.val_loss;
  if (row.skipped) json["skipped"] = true;
  return json.dump() + "\n";
}

std::optional<StepMetrics> FromLine(const std::string& line) {
  const Json json = Json::parse(line, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  const auto number = [&](const char* key) {
    const Json value = json.value(key, Json());
    return value.is_number() ? value.get<double>() : std::nan("");
  };
  StepMetrics row;
  const double step = number("step"), tokens = number("tokens");
  if (std::isnan(step) || std::isnan(tokens)) return std::nullopt;
  row.step = static_cast<int64_t>(step);
  row.tokens = static_cast<int64_t>(tokens);
  row.loss = number("loss");
  row.lr = number("lr");
  row.grad_norm = number("grad_norm");
  row.tokens_per_second = number("tokens_per_second");
  row.step_ms = number("step_ms");
  if (json.contains("val_loss")) row.val_loss = number("val_loss");
  row.skipped = json.contains("skipped");
  return row;
}

}  // namespace

absl::StatusOr<MetricsLog> MetricsLog::Open(const std::string& path, int64_t last_step) {
  MetricsLog log;
  log.path_ = path;
  std::string kept;
  if (last_step > 0) {
    absl::StatusOr<std::string> content = ReadFile(path);
    if (!content.ok() && !absl::IsNotFound(content.status())) return content.status();
    const std::vector<std::string> lines = absl::StrSplit(content.value_or(""), '\n');
    for (const std::string& line : lines) {
      std::optional<StepMetrics> row = FromLine(line);
      if (!row.has_value() || row->step > last_step) continue;
      absl::StrAppend(&kept, line, "\n");
      log.rows_.push_back(*row);
    }
  }
  BURST_RETURN_IF_ERROR(WriteFileAtomically(path, kept));
  log.file_.reset(fopen(path.c_str(), "ae"));
  if (log.file_ == nullptr) {
    return absl::InternalError(absl::StrCat("cannot append to ", path, ": ", strerror(errno)));
  }
  return log;
}

absl::Status MetricsLog::Append(const StepMetrics& row) {
  rows_.push_back(row);
  const std::string line = ToLine(row);
  if (fwrite(line.data(), 1, line.size(), file_.get()) != line.size() || fflush(file_.get()) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot write ", path_, ": ", strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace burst
