#include "train/report/html_report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/check.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/line_plot.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr char kStyle[] = R"(
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1680px; margin: 2em auto; padding: 0 1em; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(560px, 1fr)); gap: 1em; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .25em .75em; border-bottom: 1px solid #8884; text-align: right; }
pre { white-space: pre-wrap; padding: 1em; border: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
)";

using Value = std::function<std::optional<double>(const RunRecord&, const StepMetrics&)>;

// Plots of values over the tokens that the runs have seen.
class TokenPlots {
 public:
  explicit TokenPlots(const std::vector<RunRecord>& runs) : runs_(runs) {
    int64_t most = 0;
    for (const RunRecord& run : runs) most = std::max(most, run.rows.back().tokens);
    unit_ = most < 10'000'000       ? Unit{1e3, "thousand tokens"}
            : most < 10'000'000'000 ? Unit{1e6, "million tokens"}
                                    : Unit{1e9, "billion tokens"};
  }

  // Plots smoothed training losses as lines, and validation losses with dots; those of averaged
  // weights are faint.
  std::string Losses() const {
    LinePlot plot = Empty("Loss: training smoothed, validation with dots", "nats per token");
    for (size_t i = 0; i < runs_.size(); ++i) {
      const int color = static_cast<int>(i);
      const Curve training =
          CurveOf(runs_[i], [](const RunRecord&, const StepMetrics& row) { return row.loss; });
      plot.series.push_back({color, runs_[i].name, Thinned(Smoothed(training))});
      for (const auto value : {&StepMetrics::val_loss, &StepMetrics::val_loss_ema}) {
        const Curve validation =
            CurveOf(runs_[i], [&](const RunRecord&, const StepMetrics& row) { return row.*value; });
        plot.series.push_back({color, "", validation, /*dots=*/validation.size() <= 100,
                               /*faint=*/value == &StepMetrics::val_loss_ema});
      }
    }
    return LinePlotSvg(plot);
  }

  // Plots a value of each step, from 0 on. Returns "" if no run has it.
  std::string Values(const char* title, const char* y_label, const Value& value) const {
    LinePlot plot = Empty(title, y_label);
    plot.from_zero = true;
    bool some = false;
    for (size_t i = 0; i < runs_.size(); ++i) {
      const std::string label = runs_.size() > 1 ? runs_[i].name : "";
      plot.series.push_back({static_cast<int>(i), label, Thinned(CurveOf(runs_[i], value))});
      some |= !plot.series.back().points.empty();
    }
    return some ? LinePlotSvg(plot) : "";
  }

 private:
  struct Unit {
    double tokens = 1;
    const char* name = "";
  };

  LinePlot Empty(const char* title, const char* y_label) const {
    LinePlot plot;
    plot.title = title;
    plot.x_label = unit_.name;
    plot.y_label = y_label;
    return plot;
  }

  // Returns the finite values of a run.
  Curve CurveOf(const RunRecord& run, const Value& value) const {
    Curve curve;
    for (const StepMetrics& row : run.rows) {
      const std::optional<double> y = value(run, row);
      if (!y.has_value() || !std::isfinite(*y)) continue;
      curve.push_back({static_cast<double>(row.tokens) / unit_.tokens, *y});
    }
    return curve;
  }

  const std::vector<RunRecord>& runs_;
  Unit unit_;
};

// Returns the share of the peak, counted as "full", in percent; none if the peak is unknown.
std::optional<double> Mfu(const RunRecord& run, double tokens_per_second) {
  if (run.facts.peak_flops <= 0) return std::nullopt;
  return 100 * tokens_per_second * run.facts.flops_per_token / run.facts.peak_flops;
}

// Returns the share of a step in which communication was exposed; none if it was not measured.
std::optional<double> ExposedPercent(const StepMetrics& row) {
  if (!row.exposed_ms.has_value()) return std::nullopt;
  return 100 * *row.exposed_ms / row.step_ms;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string Row(const std::vector<std::string>& cells, const char* tag) {
  std::string row = "<tr>";
  for (const std::string& cell : cells) {
    absl::StrAppend(&row, "<", tag, ">", EscapeMarkup(cell), "</", tag, ">");
  }
  return row + "</tr>\n";
}

// Returns the loss of a run's last validation; none if it has none.
std::optional<double> LastValidation(const RunRecord& run) {
  std::optional<double> last;
  for (const StepMetrics& row : run.rows) {
    if (row.val_loss.has_value() && std::isfinite(*row.val_loss)) last = row.val_loss;
  }
  return last;
}

std::string Shown(const std::optional<double>& value, const absl::FormatSpec<double>& format) {
  return value.has_value() ? absl::StrFormat(format, *value) : "-";
}

std::optional<double> MedianOf(const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  return Median(values);
}

// Returns a run's figures, with their names. `target`, unless none, is a validation loss that runs
// are compared by.
std::vector<std::pair<std::string, std::string>> FiguresOf(const RunRecord& run,
                                                           const std::optional<double>& target) {
  std::optional<double> best, best_average;
  std::vector<double> speeds, exposed;
  int64_t skipped = 0, reached = 0;
  for (const StepMetrics& row : run.rows) {
    for (const auto& [loss, least] :
         {std::pair(row.val_loss, &best), {row.val_loss_ema, &best_average}}) {
      if (loss.has_value()) *least = std::min(least->value_or(HUGE_VAL), *loss);
    }
    if (reached == 0 && target.has_value() && best.value_or(HUGE_VAL) <= *target) {
      reached = row.step;
    }
    if (std::isfinite(row.tokens_per_second)) speeds.push_back(row.tokens_per_second);
    const std::optional<double> percent = ExposedPercent(row);
    if (percent.has_value() && std::isfinite(*percent)) exposed.push_back(*percent);
    skipped += row.skipped ? 1 : 0;
  }
  const StepMetrics& last = run.rows.back();
  const RunFacts& facts = run.facts;
  const std::optional<double> speed = MedianOf(speeds);
  std::vector<std::pair<std::string, std::string>> figures = {
      {"run", run.name},
      {"steps", Thousands(last.step)},
      {"tokens", Thousands(last.tokens)},
      {"last loss", absl::StrFormat("%.4f", last.loss)},
      {"best validation", Shown(best, "%.4f")},
      {"of the average", Shown(best_average, "%.4f")},
      {"tokens/s, median", speed.has_value() ? Thousands(std::llround(*speed)) : "-"},
      {"MFU", Shown(speed.has_value() ? Mfu(run, *speed) : std::nullopt, "%.1f %%")},
      {"exposed communication", Shown(MedianOf(exposed), "%.1f %%")},
      {"peak memory, rank 0",
       facts.peak_bytes > 0
           ? absl::StrFormat("%.1f MiB", static_cast<double>(facts.peak_bytes) / (1 << 20))
           : "-"},
      {"time", facts.seconds > 0 ? ShortDuration(facts.seconds) : "-"},
      {"skipped steps", Thousands(skipped)}};
  if (target.has_value()) {
    figures.insert(figures.begin() + 5, {absl::StrFormat("first step at %.4f", *target),
                                         reached > 0 ? Thousands(reached) : "-"});
  }
  return figures;
}

// Several runs are compared by the step at which they have the last validation loss of the first.
std::string FiguresTable(const std::vector<RunRecord>& runs) {
  const std::optional<double> target =
      runs.size() > 1 ? LastValidation(runs[0]) : std::optional<double>();
  std::string head, rows;
  for (const RunRecord& run : runs) {
    std::vector<std::string> names, values;
    for (auto& [name, value] : FiguresOf(run, target)) {
      names.push_back(name);
      values.push_back(value);
    }
    head = Row(names, "th");
    rows += Row(values, "td");
  }
  return "<table>\n" + head + rows + "</table>\n";
}

// Returns the planned costs of steps, with the medians of the measured ones; "" without a plan.
std::string PlansTable(const std::vector<RunRecord>& runs) {
  std::string rows;
  for (const RunRecord& run : runs) {
    if (run.facts.planned.empty()) continue;
    std::vector<double> times;
    for (const StepMetrics& row : run.rows) {
      if (std::isfinite(row.step_ms)) times.push_back(row.step_ms);
    }
    rows += Row({run.name, run.facts.planned,
                 times.empty() ? "-" : absl::StrFormat("%.4g s a step", Median(times) / 1000)},
                "td");
  }
  if (rows.empty()) return "";
  return "<h2>Planned and measured</h2>\n<table>\n" + Row({"run", "planned", "measured"}, "th") +
         rows + "</table>\n";
}

std::string Samples(const std::vector<RunRecord>& runs) {
  std::string samples;
  for (const RunRecord& run : runs) {
    if (run.facts.sample.empty()) continue;
    absl::StrAppend(&samples, "<h3>", EscapeMarkup(run.name), "</h3>\n<pre>",
                    EscapeMarkup(run.facts.sample), "</pre>\n");
  }
  return samples.empty() ? "" : "<h2>Samples</h2>\n" + samples;
}

// Returns the options by name, those that differ between the runs or those that are equal.
std::string OptionsTable(const std::vector<RunRecord>& runs, bool differ) {
  std::map<std::string, std::vector<std::string>> values;
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const auto& [name, value] : runs[i].options) {
      std::vector<std::string>& row = values[name];
      row.resize(runs.size(), "-");
      row[i] = value;
    }
  }
  std::string rows;
  for (const auto& [name, row] : values) {
    const bool equal = std::all_of(row.begin(), row.end(), [&](auto& v) { return v == row[0]; });
    if (equal == differ) continue;
    std::vector<std::string> cells = {"--" + name};
    cells.insert(cells.end(), row.begin(), differ ? row.end() : row.begin() + 1);
    rows += Row(cells, "td");
  }
  if (rows.empty()) return "";
  std::vector<std::string> head = {"option"};
  for (size_t i = 0; i < (differ ? runs.size() : 1); ++i) {
    head.push_back(differ ? runs[i].name : "value");
  }
  return "<table>\n" + Row(head, "th") + rows + "</table>\n";
}

}  // namespace

absl::StatusOr<RunRecord> ReadRun(const std::string& folder) {
  RunRecord run;
  const fs::path path = fs::path(folder).lexically_normal();
  run.name = (path.has_filename() ? path : path.parent_path()).filename().string();
  for (const char* file : {"metrics.jsonl", "config.json"}) {
    std::error_code error;
    if (fs::status(path / file, error).type() != fs::file_type::not_found) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("RUN: must be a folder of a run, with metrics.jsonl and config.json; got ",
                     folder, " without ", file, "; give the --out of a run"));
  }
  BURST_ASSIGN_OR_RETURN(run.rows, ReadMetrics((path / "metrics.jsonl").string()));
  if (run.rows.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder, ": metrics.jsonl has no step yet; try again after the first one"));
  }
  run.facts = ReadRunFacts(path.string());
  BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile((path / "config.json").string()));
  const auto json = ParseJson<nlohmann::ordered_json>(text);
  if (!json.ok() || !json->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, ": config.json must be a run's options; got other text"));
  }
  for (const auto& [name, value] : json->items()) {
    run.options.emplace_back(name, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return run;
}

std::string HtmlReport(const std::vector<RunRecord>& runs) {
  BURST_CHECK(!runs.empty() && runs.size() <= kMaxReportRuns);
  std::string names;
  for (const RunRecord& run : runs) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", EscapeMarkup(run.name));
  }
  const TokenPlots plots(runs);
  std::string page =
      absl::StrCat("<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>", names,
                   "</title>\n<style>", kStyle, "</style>\n<h1>", names, "</h1>\n",
                   FiguresTable(runs), "<main>\n", plots.Losses());
  page += plots.Values("Norm of the gradients", "before clipping",
                       [](const RunRecord&, const StepMetrics& row) { return row.grad_norm; });
  page += plots.Values("Speed", "thousand tokens/s", [](const RunRecord&, const StepMetrics& row) {
    return row.tokens_per_second / 1000;
  });
  page += plots.Values(
      "MFU", "percent of the measured peak",
      [](const RunRecord& run, const StepMetrics& row) { return Mfu(run, row.tokens_per_second); });
  page +=
      plots.Values("Pipeline bubble", "idle time / busy time",
                   [](const RunRecord&, const StepMetrics& row) { return row.pipeline_bubble; });
  page +=
      plots.Values("Exposed communication", "percent of the step",
                   [](const RunRecord&, const StepMetrics& row) { return ExposedPercent(row); });
  page += plots.Values("Learning rate", "",
                       [](const RunRecord&, const StepMetrics& row) { return row.lr; });
  page += "</main>\n" + PlansTable(runs) + Samples(runs);
  if (runs.size() > 1) page += "<h2>Options that differ</h2>\n" + OptionsTable(runs, true);
  absl::StrAppend(&page, "<details><summary>Options", runs.size() > 1 ? " that are equal" : "",
                  "</summary>\n", OptionsTable(runs, false), "</details>\n</html>\n");
  return page;
}

}  // namespace burst
