#include "train/report/plot.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "burst/cli/line_plot.h"

namespace burst {
namespace {

constexpr size_t kMaxPoints = 800;  // a curve of more is averaged: one point a pixel

// Means of equal runs of points, at most kMaxPoints.
Curve Thin(const Curve& curve) {
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

// An exponential average over about a fiftieth of the curve, corrected for its start.
Curve Smooth(const Curve& curve) {
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
  LinePlot plot;
  plot.title = std::string(title);
  plot.x_label = "step";
  plot.y_label = "loss (nats per token)";
  const Curve smooth = Smooth(train);
  const auto label = [](const char* name, const Curve& curve) {
    return curve.empty() ? "" : absl::StrFormat("%s, last %.4f", name, curve.back().y);
  };
  plot.series = {{0, "", Thin(train), /*dots=*/false, /*faint=*/true},
                 {0, label("training", smooth), Thin(smooth), false, false},
                 {1, label("validation", validation), validation, validation.size() <= 100, false}};
  return LinePlotSvg(plot);
}

}  // namespace burst
