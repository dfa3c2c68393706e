// Curves over an axis, as a small SVG picture that follows the reader's light or dark scheme.
#pragma once

#include <string>
#include <vector>

namespace burst {

struct PlotPoint {
  double x, y;
};
using Curve = std::vector<PlotPoint>;

// Returns at most 800 points, the means of equal ranges of points: about one a pixel.
Curve Thinned(const Curve& curve);
// Returns an exponential average over about a fiftieth of the curve, corrected for its start.
Curve Smoothed(const Curve& curve);

struct PlotSeries {
  int color = 0;      // 0 to kPlotColors - 1
  std::string label;  // empty: not in the legend
  Curve points;       // increasing in x, finite
  bool dots = false;
  bool faint = false;
};
inline constexpr int kPlotColors = 6;

struct LinePlot {
  std::string title, x_label, y_label;
  // The x axis: linear from 0 with whole numbers, or logarithmic with a tick at each point's x,
  // which is then positive.
  bool log_x = false;
  bool from_zero = false;  // the y axis starts at 0
  std::vector<PlotSeries> series;
};

std::string LinePlotSvg(const LinePlot& plot);

}  // namespace burst
