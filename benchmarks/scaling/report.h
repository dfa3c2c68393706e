// Writes tables of measurements: for the terminal, as CSV, as JSON, and as a plot.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/cli/line_plot.h"

namespace burst {

// A measured case: names and values. All rows of a table have the same names in the same order.
using ReportRow = nlohmann::ordered_json;

// A column of the terminal's table: how row[key] * scale is printed.
struct ReportColumn {
  std::string key;
  std::string header;
  int decimals = 0;
  double scale = 1;
};

// The header and the rows of a table. Numbers are right-aligned, text is left-aligned, null is "-".
std::string TableHeader(const std::vector<ReportColumn>& columns);
std::string TableLine(const ReportRow& row, const std::vector<ReportColumn>& columns);

// Returns the rows as CSV (RFC 4180). null is empty.
std::string Csv(const std::vector<ReportRow>& rows);

// Plots y_key (times y_scale) over the one of x_keys that has the most distinct values; the first
// one wins a tie. There is a curve for every combination of `strategy`, `recompute` and the other
// x_keys.
LinePlot PlotOf(const std::vector<ReportRow>& rows, const std::vector<std::string>& x_keys,
                const std::string& y_key, double y_scale);

// Makes the folder of --out if it is missing.
absl::Status MakeFolder(const std::string& folder);
// Writes NAME.csv, NAME.json (`about`, then "rows") and NAME.svg into the folder.
absl::Status WriteReport(const std::string& folder, const std::string& name, ReportRow about,
                         const std::vector<ReportRow>& rows, const LinePlot& plot);

}  // namespace burst
