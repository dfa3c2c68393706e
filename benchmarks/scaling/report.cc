#include "benchmarks/scaling/report.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"

namespace burst {
namespace {

constexpr size_t kLeastWidth = 8;

size_t Width(const ReportColumn& column) { return std::max(column.header.size(), kLeastWidth); }

std::string Cell(const ReportRow& row, const ReportColumn& column) {
  const ReportRow& value = row.at(column.key);
  if (value.is_null()) return "-";
  if (value.is_string()) return value.get<std::string>();
  return absl::StrFormat("%.*f", column.decimals, value.get<double>() * column.scale);
}

std::string CsvCell(const ReportRow& value) {
  if (value.is_null()) return "";
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

std::string Line(const std::vector<ReportColumn>& columns, const std::vector<std::string>& cells,
                 const std::vector<bool>& left) {
  std::string line;
  for (size_t i = 0; i < columns.size(); ++i) {
    const std::string space(
        cells[i].size() < Width(columns[i]) ? Width(columns[i]) - cells[i].size() : 0, ' ');
    absl::StrAppend(&line, i == 0 ? "" : "  ", left[i] ? "" : space, cells[i],
                    left[i] ? space : "");
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line + "\n";
}

}  // namespace

std::string TableHeader(const std::vector<ReportColumn>& columns) {
  std::vector<std::string> cells;
  for (const ReportColumn& column : columns) cells.push_back(column.header);
  std::vector<bool> left(columns.size());
  if (!left.empty()) left[0] = true;
  return Line(columns, cells, left);
}

std::string TableLine(const ReportRow& row, const std::vector<ReportColumn>& columns) {
  std::vector<std::string> cells;
  std::vector<bool> left;
  for (const ReportColumn& column : columns) {
    cells.push_back(Cell(row, column));
    left.push_back(row.at(column.key).is_string());
  }
  return Line(columns, cells, left);
}

std::string Csv(const std::vector<ReportRow>& rows) {
  std::string csv;
  if (rows.empty()) return csv;
  const char* comma = "";
  for (const auto& item : rows[0].items()) {
    absl::StrAppend(&csv, std::exchange(comma, ","), CsvCell(item.key()));
  }
  csv += "\n";
  for (const ReportRow& row : rows) {
    comma = "";
    for (const auto& item : row.items()) {
      absl::StrAppend(&csv, std::exchange(comma, ","), CsvCell(item.value()));
    }
    csv += "\n";
  }
  return csv;
}

LinePlot PlotOf(const std::vector<ReportRow>& rows, const std::vector<std::string>& x_keys,
                const std::string& y_key, double y_scale) {
  const auto values = [&](const std::string& key) {
    std::set<double> distinct;
    for (const ReportRow& row : rows) distinct.insert(row.at(key).get<double>());
    return distinct.size();
  };
  std::string x_key = x_keys[0];
  for (const std::string& key : x_keys) {
    if (values(key) > values(x_key)) x_key = key;
  }
  LinePlot plot;
  plot.x_label = x_key;
  plot.log_x = true;
  plot.from_zero = true;
  for (const ReportRow& row : rows) {
    if (row.at(y_key).is_null()) continue;
    std::string label = row.at("strategy").get<std::string>();
    for (const std::string& key : x_keys) {
      if (key == x_key || values(key) == 1) continue;
      absl::StrAppend(&label, ", ", key, " ", row.at(key).dump());
    }
    const auto recompute = row.find("recompute");
    if (recompute != row.end() && *recompute != "none") {
      absl::StrAppend(&label, ", recompute ", recompute->get<std::string>());
    }
    auto series = std::find_if(plot.series.begin(), plot.series.end(),
                               [&](const PlotSeries& s) { return s.label == label; });
    if (series == plot.series.end()) {
      const int color = static_cast<int>(plot.series.size()) % kPlotColors;
      series = plot.series.insert(series, {color, label, {}, /*dots=*/true, /*faint=*/false});
    }
    series->points.push_back({row.at(x_key).get<double>(), row.at(y_key).get<double>() * y_scale});
  }
  for (PlotSeries& series : plot.series) {
    std::sort(series.points.begin(), series.points.end(),
              [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; });
  }
  return plot;
}

absl::Status MakeFolder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--out: cannot make the folder ", folder, ": ", error.message()));
  }
  return absl::OkStatus();
}

absl::Status WriteReport(const std::string& folder, const std::string& name, ReportRow about,
                         const std::vector<ReportRow>& rows, const LinePlot& plot) {
  about["rows"] = rows;
  const std::string path = (std::filesystem::path(folder) / name).string();
  BURST_RETURN_IF_ERROR(WriteFileAtomically(path + ".csv", Csv(rows)));
  BURST_RETURN_IF_ERROR(WriteFileAtomically(path + ".json", about.dump(1) + "\n"));
  return WriteFileAtomically(path + ".svg", LinePlotSvg(plot));
}

}  // namespace burst
