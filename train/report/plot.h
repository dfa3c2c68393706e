// loss.svg: the run's training and validation loss as a small picture.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "train/report/metrics.h"

namespace burst {

std::string LossPlotSvg(absl::string_view title, const std::vector<StepMetrics>& rows);

}  // namespace burst
