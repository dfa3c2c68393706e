// A table of shares as a small SVG picture, whose cells are darker for larger shares.
#pragma once

#include <string>
#include <vector>

namespace burst {

struct HeatMap {
  std::string title, x_label, y_label;
  std::vector<std::string> columns, rows;
  std::vector<std::vector<double>> shares;  // [rows][columns], from 0 to 1
};

std::string HeatMapSvg(const HeatMap& map);

}  // namespace burst
