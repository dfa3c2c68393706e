#include "train/plot.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace burst {
namespace {

constexpr double kWidth = 800, kHeight = 450;
constexpr double kLeft = 64, kRight = 24, kTop = 48, kBottom = 52;
constexpr size_t kMaxPoints = 800;  // a curve of more is averaged: one point a pixel

struct Point {
  double x, y;
};
using Curve = std::vector<Point>;

// Means of equal runs of points, at most kMaxPoints.
Curve Thin(const Curve& curve) {
  const size_t run = curve.size() / kMaxPoints + 1;
  Curve thin;
  for (size_t i = 0; i < curve.size(); i += run) {
    const size_t n = std::min(run, curve.size() - i);
    Point mean = {0, 0};
    for (size_t j = i; j < i + n; ++j) mean.x += curve[j].x, mean.y += curve[j].y;
    thin.push_back({mean.x / static_cast<double>(n), mean.y / static_cast<double>(n)});
  }
  return thin;
}

// An exponential average over about a fiftieth of the curve, corrected for its start.
Curve Smooth(const Curve& curve) {
  const double keep = 1 - 1 / std::max(1.0, static_cast<double>(curve.size()) / 50);
  Curve smooth;
  double sum = 0, weight = 0;
  for (const Point& point : curve) {
    sum = keep * sum + point.y;
    weight = keep * weight + 1;
    smooth.push_back({point.x, sum / weight});
  }
  return smooth;
}

// One of 1, 2, 5 times a power of ten, that gives about `count` ticks.
double TickStep(double range, double count) {
  const double rough = range / count, power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

class Axes {
 public:
  Axes(double x_max, double y_min, double y_max) : x_max_(x_max) {
    y_step_ = TickStep(std::max(y_max - y_min, 1e-3), 6);
    y_min_ = std::floor(y_min / y_step_) * y_step_;
    y_max_ = std::max(std::ceil(y_max / y_step_), std::floor(y_min / y_step_) + 1) * y_step_;
  }

  double X(double x) const { return kLeft + x / x_max_ * (kWidth - kLeft - kRight); }
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
    const double x_step = std::max(1.0, TickStep(x_max_, 8));
    for (double x = 0; x <= x_max_; x += x_step) {
      absl::StrAppendFormat(&svg,
                            "<path class=\"grid\" d=\"M%.1f %.0fv5\"/>"
                            "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.0f</text>\n",
                            X(x), kHeight - kBottom, X(x), kHeight - kBottom + 20, x);
    }
    absl::StrAppendFormat(&svg, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\">step</text>\n",
                          (kLeft + kWidth - kRight) / 2, kHeight - 10);
    absl::StrAppendFormat(&svg,
                          "<text transform=\"translate(16 %.0f) rotate(-90)\" "
                          "text-anchor=\"middle\">loss (nats per token)</text>\n",
                          (kTop + kHeight - kBottom) / 2);
    return svg;
  }

  std::string Line(const char* style, const Curve& curve) const {
    if (curve.empty()) return "";
    std::string svg = absl::StrCat("<path class=\"", style, "\" d=\"");
    for (size_t i = 0; i < curve.size(); ++i) {
      absl::StrAppendFormat(&svg, "%s%.1f %.1f", i == 0 ? "M" : "L", X(curve[i].x), Y(curve[i].y));
    }
    return absl::StrCat(svg, "\"/>\n");
  }

  std::string Dots(const char* style, const Curve& curve) const {
    std::string svg;
    for (const Point& point : curve) {
      absl::StrAppendFormat(&svg, "<circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>\n", style,
                            X(point.x), Y(point.y));
    }
    return svg;
  }

 private:
  double x_max_, y_min_, y_max_, y_step_;
};

std::string Escape(absl::string_view text) {
  std::string escaped;
  for (char c : text) {
    if (c == '&') {
      escaped += "&amp;";
    } else if (c == '<') {
      escaped += "&lt;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

// Follows the reader's light or dark scheme.
constexpr char kStyle[] = R"(<style>
  svg { background: #fff; font: 12px system-ui, sans-serif; }
  text { fill: #333; } .title { font-size: 15px; font-weight: 600; }
  path { fill: none; stroke-linejoin: round; } .grid { stroke: #e4e4e4; }
  .raw { stroke: #3b76c4; opacity: .3; } .train { stroke: #3b76c4; stroke-width: 2; }
  .validation { stroke: #d1603d; stroke-width: 2; }
  circle.validation { fill: #d1603d; stroke: none; }
  @media (prefers-color-scheme: dark) {
    svg { background: #16181c; } text { fill: #d5d8dc; } .grid { stroke: #33373d; }
    .raw, .train { stroke: #6ea8ee; }
    .validation { stroke: #f0906c; } circle.validation { fill: #f0906c; }
  }
</style>
)";

std::string Legend(const char* style, const std::string& label, double y) {
  return absl::StrFormat(
      "<path class=\"%s\" d=\"M%.0f %.0fh24\"/><text x=\"%.0f\" y=\"%.0f\">%s</text>\n", style,
      kWidth - 218, y, kWidth - 186, y + 4, label);
}

}  // namespace

std::string LossPlotSvg(absl::string_view title, const std::vector<StepMetrics>& rows) {
  Curve train, validation;
  for (const StepMetrics& row : rows) {
    const double step = static_cast<double>(row.step);
    if (std::isfinite(row.loss)) train.push_back({step, row.loss});
    if (row.val_loss.has_value() && std::isfinite(*row.val_loss)) {
      validation.push_back({step, *row.val_loss});
    }
  }
  double y_min = HUGE_VAL, y_max = -HUGE_VAL;
  for (const Curve* curve : {&train, &validation}) {
    for (const Point& point : *curve) {
      y_min = std::min(y_min, point.y), y_max = std::max(y_max, point.y);
    }
  }
  if (y_min > y_max) y_min = 0, y_max = 1;
  const double last = rows.empty() ? 1 : static_cast<double>(rows.back().step);
  const Axes axes(std::max(1.0, last), y_min, y_max);

  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\">\n", kWidth, kHeight);
  absl::StrAppend(&svg, kStyle, axes.Svg(), axes.Line("raw", Thin(train)),
                  axes.Line("train", Thin(Smooth(train))), axes.Line("validation", validation),
                  validation.size() <= 100 ? axes.Dots("validation", validation) : "");
  absl::StrAppendFormat(&svg, "<text class=\"title\" x=\"%.0f\" y=\"28\">%s</text>\n", kLeft,
                        Escape(title));
  if (!train.empty()) {
    absl::StrAppend(
        &svg,
        Legend("train", absl::StrFormat("training, last %.4f", Smooth(train).back().y), kTop + 14));
  }
  if (!validation.empty()) {
    absl::StrAppend(
        &svg, Legend("validation", absl::StrFormat("validation, last %.4f", validation.back().y),
                     kTop + 34));
  }
  return absl::StrCat(svg, "</svg>\n");
}

}  // namespace burst
