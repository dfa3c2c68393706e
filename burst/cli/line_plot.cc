#include "burst/cli/line_plot.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "burst/cli/text.h"

namespace burst {

Curve Thinned(const Curve& curve) {
  constexpr size_t kMaxPoints = 800;
  const size_t run = curve.size() / kMaxPoints + 1;
  Curve thin;
  for (size_t i = 0; i < curve.size(); i += run) {
    const size_t n = std::min(run, curve.size() - i);
    PlotPoint mean = {0, 0};
    for (size_t j = i; j < i + n; ++j) mean.x += curve[j].x, mean.y += curve[j].y;
    thin.push_back({mean.x / static_cast<double>(n), mean.y / static_cast<double>(n)});
  }
  return thin;
}

Curve Smoothed(const Curve& curve) {
  const double keep = 1 - 1 / std::max(1.0, static_cast<double>(curve.size()) / 50);
  Curve smooth;
  double sum = 0, weight = 0;
  for (const PlotPoint& point : curve) {
    sum = keep * sum + point.y;
    weight = keep * weight + 1;
    smooth.push_back({point.x, sum / weight});
  }
  return smooth;
}

namespace {

constexpr double kWidth = 800, kHeight = 450;
constexpr double kLeft = 64, kRight = 24, kTop = 48, kBottom = 52;

// Returns 1, 2 or 5 times a power of ten, so that there are about `count` ticks.
double TickStep(double range, double count) {
  const double rough = range / count, power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

class Axes {
 public:
  explicit Axes(const LinePlot& plot) : plot_(plot) {
    double x_min = HUGE_VAL, x_max = -HUGE_VAL, y_min = HUGE_VAL, y_max = -HUGE_VAL;
    for (const PlotSeries& series : plot.series) {
      for (const PlotPoint& point : series.points) {
        x_min = std::min(x_min, point.x), x_max = std::max(x_max, point.x);
        y_min = std::min(y_min, point.y), y_max = std::max(y_max, point.y);
        if (plot.log_x) x_ticks_.insert(point.x);
      }
    }
    if (y_min > y_max) x_min = x_max = 1, y_min = 0, y_max = 1;
    if (plot.from_zero) {
      y_min = 0;
      // This leaves room for the legend, whose lines are a twentieth of the height.
      y_max *= 1 + 0.05 * static_cast<double>(plot.series.size());
    }
    if (plot.log_x) {
      // Both sides have half an octave of space.
      x_begin_ = std::log2(x_min) - 0.5;
      x_end_ = std::log2(x_max) + 0.5;
    } else {
      x_end_ = std::max(1.0, x_max);
      const double step = std::max(1.0, TickStep(x_end_, 8));
      for (double x = 0; x <= x_end_; x += step) x_ticks_.insert(x);
    }
    const double range = y_max - y_min, least = plot.from_zero && y_max > 0 ? y_max : 1e-3;
    y_step_ = TickStep(std::max(range, least), 6);
    y_min_ = std::floor(y_min / y_step_) * y_step_;
    y_max_ = std::max(std::ceil(y_max / y_step_), std::floor(y_min / y_step_) + 1) * y_step_;
  }

  double X(double x) const {
    const double along = plot_.log_x ? std::log2(x) : x;
    return kLeft + (along - x_begin_) / (x_end_ - x_begin_) * (kWidth - kLeft - kRight);
  }
  double Y(double y) const {
    return kHeight - kBottom - (y - y_min_) / (y_max_ - y_min_) * (kHeight - kTop - kBottom);
  }

  std::string Svg() const {
    std::string svg;
    const int decimals = std::max(0, -static_cast<int>(std::floor(std::log10(y_step_) + 1e-9)));
    for (int i = 0; y_min_ + i * y_step_ <= y_max_ + y_step_ / 2; ++i) {
      const double y = y_min_ + i * y_step_;
      absl::StrAppendFormat(&svg,
                            "<path class=\"grid\" d=\"M%.0f %.1fH%.0f\"/>"
                            "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%.*f</text>\n",
                            kLeft, Y(y), kWidth - kRight, kLeft - 8, Y(y) + 4, decimals, y);
    }
    for (double x : x_ticks_) {
      absl::StrAppendFormat(&svg,
                            "<path class=\"grid\" d=\"M%.1f %.0fv5\"/>"
                            "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.0f</text>\n",
                            X(x), kHeight - kBottom, X(x), kHeight - kBottom + 20, x);
    }
    absl::StrAppendFormat(&svg, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\">%s</text>\n",
                          (kLeft + kWidth - kRight) / 2, kHeight - 10, EscapeMarkup(plot_.x_label));
    absl::StrAppendFormat(&svg,
                          "<text transform=\"translate(16 %.0f) rotate(-90)\" "
                          "text-anchor=\"middle\">%s</text>\n",
                          (kTop + kHeight - kBottom) / 2, EscapeMarkup(plot_.y_label));
    return svg;
  }

  std::string Line(const PlotSeries& series) const {
    if (series.points.empty()) return "";
    std::string svg = absl::StrFormat("<path class=\"color%d%s\" d=\"", series.color,
                                      series.faint ? " faint" : "");
    for (size_t i = 0; i < series.points.size(); ++i) {
      absl::StrAppendFormat(&svg, "%s%.1f %.1f", i == 0 ? "M" : "L", X(series.points[i].x),
                            Y(series.points[i].y));
    }
    absl::StrAppend(&svg, "\"/>\n");
    for (const PlotPoint& point : series.dots ? series.points : Curve()) {
      absl::StrAppendFormat(&svg, "<circle class=\"color%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n",
                            series.color, X(point.x), Y(point.y));
    }
    return svg;
  }

 private:
  const LinePlot& plot_;
  double x_begin_ = 0, x_end_ = 1, y_min_ = 0, y_max_ = 1, y_step_ = 1;
  std::set<double> x_ticks_;
};

// The colors for light and for dark pages. The order keeps neighbors apart for color-blind readers,
// too.
constexpr const char* kColors[kPlotColors][2] = {
    {"#3b76c4", "#6ea8ee"}, {"#d1603d", "#f0906c"}, {"#3f8f5f", "#74c795"},
    {"#8a5fb5", "#bd9ae3"}, {"#b08a1e", "#dcbb5c"}, {"#5b6470", "#a3adb8"},
};

std::string Style() {
  std::string style =
      "<style>\n"
      "  svg { background: #fff; font: 12px system-ui, sans-serif; }\n"
      "  text { fill: #333; } .title { font-size: 15px; font-weight: 600; }\n"
      "  path { fill: none; stroke-linejoin: round; stroke-width: 2; }\n"
      "  .grid { stroke: #e4e4e4; stroke-width: 1; } .faint { opacity: .3; stroke-width: 1; }\n";
  const auto colors = [&](int scheme) {
    for (int i = 0; i < kPlotColors; ++i) {
      absl::StrAppendFormat(&style, "  path.color%d { stroke: %s; } circle.color%d { fill: %s; }\n",
                            i, kColors[i][scheme], i, kColors[i][scheme]);
    }
  };
  colors(0);
  absl::StrAppend(&style,
                  "  @media (prefers-color-scheme: dark) {\n"
                  "  svg { background: #16181c; } text { fill: #d5d8dc; }\n"
                  "  .grid { stroke: #33373d; }\n");
  colors(1);
  return absl::StrCat(style, "  }\n</style>\n");
}

}  // namespace

std::string LinePlotSvg(const LinePlot& plot) {
  const Axes axes(plot);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\">\n", kWidth, kHeight);
  absl::StrAppend(&svg, Style(), axes.Svg());
  for (const PlotSeries& series : plot.series) absl::StrAppend(&svg, axes.Line(series));
  absl::StrAppendFormat(&svg, "<text class=\"title\" x=\"%.0f\" y=\"28\">%s</text>\n", kLeft,
                        EscapeMarkup(plot.title));
  double y = kTop + 14;
  for (const PlotSeries& series : plot.series) {
    if (series.label.empty() || series.points.empty()) continue;
    absl::StrAppendFormat(
        &svg,
        "<path class=\"color%d\" d=\"M%.0f %.0fh24\"/><text x=\"%.0f\" y=\"%.0f\">%s</text>\n",
        series.color, kWidth - 218, y, kWidth - 186, y + 4, EscapeMarkup(series.label));
    y += 20;
  }
  return absl::StrCat(svg, "</svg>\n");
}

}  // namespace burst
