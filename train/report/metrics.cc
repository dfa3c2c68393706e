#include "train/report/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "burst/base/check.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/line_plot.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

std::string ToLine(const StepMetrics& row) {
  Json json = {{"step", row.step},           {"tokens", row.tokens},
               {"loss", row.loss},           {"lr", row.lr},
               {"grad_norm", row.grad_norm}, {"tokens_per_second", row.tokens_per_second},
               {"step_ms", row.step_ms}};
  for (const OptionalMetric& metric : kOptionalMetrics) {
    if ((row.*metric.value).has_value()) json[metric.name] = *(row.*metric.value);
  }
  if (row.skipped) json["skipped"] = true;
  return json.dump() + "\n";
}

std::optional<StepMetrics> FromLine(const std::string& line) {
  const absl::StatusOr<Json> parsed = ParseJson<Json>(line);
  if (!parsed.ok() || !parsed->is_object()) return std::nullopt;
  const Json& json = *parsed;
  const auto number = [&](const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_number() ? found->get<double>() : std::nan("");
  };
  StepMetrics row;
  for (const auto& [key, value] :
       {std::pair<const char*, int64_t*>{"step", &row.step}, {"tokens", &row.tokens}}) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_number_integer()) return std::nullopt;
    *value = found->get<int64_t>();
  }
  row.loss = number("loss");
  row.lr = number("lr");
  row.grad_norm = number("grad_norm");
  row.tokens_per_second = number("tokens_per_second");
  row.step_ms = number("step_ms");
  for (const OptionalMetric& metric : kOptionalMetrics) {
    if (json.contains(metric.name)) row.*metric.value = number(metric.name);
  }
  row.skipped = json.contains("skipped");
  return row;
}

}  // namespace

absl::StatusOr<std::vector<StepMetrics>> ReadMetrics(const std::string& path) {
  BURST_ASSIGN_OR_RETURN(const std::string content, ReadFile(path));
  std::vector<StepMetrics> rows;
  for (const absl::string_view line : absl::StrSplit(content, '\n')) {
    std::optional<StepMetrics> row = FromLine(std::string(line));
    if (row.has_value() && (rows.empty() || row->step > rows.back().step)) rows.push_back(*row);
  }
  return rows;
}

absl::StatusOr<MetricsLog> MetricsLog::Open(const std::string& path, int64_t last_step) {
  MetricsLog log(path);
  std::string rows;
  size_t last_line = 0;  // bytes of the last line
  int64_t step = 0;
  if (last_step > 0) {
    absl::StatusOr<std::string> content = ReadFile(path);
    if (!content.ok() && !absl::IsNotFound(content.status())) return content.status();
    const std::vector<std::string> lines = absl::StrSplit(content.value_or(""), '\n');
    for (const std::string& line : lines) {
      std::optional<StepMetrics> row = FromLine(line);
      if (!row.has_value() || row->step > last_step || row->step <= step) continue;
      step = row->step;
      absl::StrAppend(&rows, line, "\n");
      last_line = line.size() + 1;
      log.rows_.push_back(*row);
    }
  }
  BURST_RETURN_IF_ERROR(WriteFileAtomically(path, rows));
  log.fd_ = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (log.fd_ < 0) return log.CannotWrite();
  log.end_ = static_cast<int64_t>(rows.size());
  log.last_row_ = rows.empty() ? 0 : log.end_ - static_cast<int64_t>(last_line);
  return log;
}

MetricsLog::MetricsLog(MetricsLog&& other)
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      last_row_(other.last_row_),
      end_(other.end_),
      rows_(std::move(other.rows_)) {}

MetricsLog::~MetricsLog() {
  if (fd_ >= 0) close(fd_);
}

absl::Status MetricsLog::SetLastValidation(const StepMetrics& row) {
  BURST_CHECK(!rows_.empty());
  for (const OptionalMetric& metric : kOptionalMetrics) {
    if (metric.of_validation) rows_.back().*metric.value = row.*metric.value;
  }
  return WriteLastRow();  // the row is longer than before
}

absl::Status MetricsLog::Append(const StepMetrics& row) {
  rows_.push_back(row);
  last_row_ = end_;
  return WriteLastRow();
}

absl::Status MetricsLog::WriteLastRow() {
  const std::string line = ToLine(rows_.back());
  for (size_t done = 0; done < line.size();) {
    // A write may be short for a reason that only the next write reports.
    const ssize_t written =
        pwrite(fd_, line.data() + done, line.size() - done, last_row_ + static_cast<int64_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return CannotWrite();
    done += static_cast<size_t>(written);
  }
  end_ = last_row_ + static_cast<int64_t>(line.size());
  return absl::OkStatus();
}

absl::Status MetricsLog::Sync() const { return fsync(fd_) == 0 ? absl::OkStatus() : CannotWrite(); }

absl::Status MetricsLog::CheckStillThere() const { return CheckStillNamed(fd_, path_); }

absl::Status MetricsLog::CannotWrite() const {
  return absl::ResourceExhaustedError(absl::StrCat("cannot write ", path_, ": ", strerror(errno)));
}

std::string LossPlotSvg(absl::string_view title, const std::vector<StepMetrics>& rows) {
  Curve train, validation, of_average;
  for (const StepMetrics& row : rows) {
    const double step = static_cast<double>(row.step);
    if (std::isfinite(row.loss)) train.push_back({step, row.loss});
    const auto add = [&](const std::optional<double>& loss, Curve* curve) {
      if (loss.has_value() && std::isfinite(*loss)) curve->push_back({step, *loss});
    };
    add(row.val_loss, &validation);
    add(row.val_loss_ema, &of_average);
  }
  LinePlot plot;
  plot.title = std::string(title);
  plot.x_label = "step";
  plot.y_label = "loss (nats per token)";
  const Curve smooth = Smoothed(train);
  const auto label = [](const char* name, const Curve& curve) {
    return curve.empty() ? "" : absl::StrFormat("%s, last %.4f", name, curve.back().y);
  };
  plot.series = {{0, "", Thinned(train), /*dots=*/false, /*faint=*/true},
                 {0, label("training", smooth), Thinned(smooth), false, false},
                 {1, label("validation", validation), validation, validation.size() <= 100, false},
                 {2, label("of the average", of_average), of_average, of_average.size() <= 100}};
  return LinePlotSvg(plot);
}

}  // namespace burst
