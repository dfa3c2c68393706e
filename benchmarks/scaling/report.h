// Tables of measurements: for the terminal, as CSV, as JSON, and drawn.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/cli/line_plot.h"

namespace burst {

// A measured case: names and values; those of a table have the same names in the same order.
using ReportRow = nlohmann::ordered_json;

// A column of the terminal's table: what row[key] * scale is printed as.
struct ReportColumn {
  std::string key;
  std::string header;
  int decimals = 0;
  double scale = 1;
};

// Right-aligned columns under their headers; text is left-aligned, null is "-".
std::string TableHeader(const std::vector<ReportColumn>& columns);
std::string TableLine(const ReportRow& row, const std::vector<ReportColumn>& columns);

// RFC 4180; null is empty.
std::string Csv(const std::vector<ReportRow>& rows);

// Plots y_key (times y_scale) over one of x_keys: the one that has the most distinct values (the
// first if there are several). There is a curve for every combination of `strategy`, `recompute`
// (of rows that have it) and the other x_keys.
LinePlot PlotOf(const std::vector<ReportRow>& rows, const std::vector<std::string>& x_keys,
                const std::string& y_key, double y_scale);

// Makes the folder of --out unless it is there.
absl::Status MakeFolder(const std::string& folder);
// Writes NAME.csv, NAME.json (`about`, then "rows") and NAME.svg into the folder.
absl::Status WriteReport(const std::string& folder, const std::string& name, ReportRow about,
                         const std::vector<ReportRow>& rows, const LinePlot& plot);

}  // namespace burst
