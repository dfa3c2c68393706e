#include "burst/cli/heat_map.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/check.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

constexpr double kLeft = 84, kTop = 48, kBottom = 52, kCellWidth = 72, kCellHeight = 36;
constexpr char kStyle[] =
    "<style>\n"
    "  svg { background: #fff; font: 12px system-ui, sans-serif; }\n"
    "  text { fill: #222; } .title { font-size: 15px; font-weight: 600; }\n"
    "  rect { fill: #6aa5ec; stroke: #ccc; }\n"
    "  @media (prefers-color-scheme: dark) {\n"
    "  svg { background: #16181c; } text { fill: #e8eaed; }\n"
    "  rect { fill: #2f67ad; stroke: #444; }\n"
    "  }\n</style>\n";

std::string Text(double x, double y, const char* anchor, const std::string& text) {
  return absl::StrFormat("<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor,
                         EscapeMarkup(text));
}

}  // namespace

std::string HeatMapSvg(const HeatMap& map) {
  BURST_CHECK_EQ(map.rows.size(), map.shares.size());
  const double width = kCellWidth * static_cast<double>(map.columns.size());
  const double bottom = kTop + kCellHeight * static_cast<double>(map.rows.size());
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\">\n%s"
      "<text class=\"title\" x=\"%.0f\" y=\"28\">%s</text>\n",
      kLeft + width + 24, bottom + kBottom, kStyle, kLeft, EscapeMarkup(map.title));
  for (size_t row = 0; row < map.rows.size(); ++row) {
    BURST_CHECK_EQ(map.shares[row].size(), map.columns.size());
    const double y = kTop + kCellHeight * static_cast<double>(row),
                 middle = y + kCellHeight / 2 + 4;
    absl::StrAppend(&svg, Text(kLeft - 8, middle, "end", map.rows[row]));
    for (size_t column = 0; column < map.columns.size(); ++column) {
      const double x = kLeft + kCellWidth * static_cast<double>(column);
      const double share = map.shares[row][column];
      absl::StrAppendFormat(&svg,
                            "<rect x=\"%.0f\" y=\"%.0f\" width=\"%.0f\" height=\"%.0f\" "
                            "fill-opacity=\"%.3f\"/>\n",
                            x, y, kCellWidth, kCellHeight, share);
      absl::StrAppend(&svg, Text(x + kCellWidth / 2, middle, "middle",
                                 absl::StrFormat("%.0f %%", 100 * share)));
    }
  }
  for (size_t column = 0; column < map.columns.size(); ++column) {
    const double x = kLeft + kCellWidth * (static_cast<double>(column) + 0.5);
    absl::StrAppend(&svg, Text(x, bottom + 20, "middle", map.columns[column]));
  }
  absl::StrAppend(&svg, Text(kLeft + width / 2, bottom + 42, "middle", map.x_label));
  absl::StrAppendFormat(&svg,
                        "<text transform=\"translate(18 %.0f) rotate(-90)\" "
                        "text-anchor=\"middle\">%s</text>\n</svg>\n",
                        (kTop + bottom) / 2, EscapeMarkup(map.y_label));
  return svg;
}

}  // namespace burst
