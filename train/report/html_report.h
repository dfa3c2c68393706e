// Returns a page about runs: their curves over one another, their last figures, their options.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "train/report/metrics.h"
#include "train/report/run_facts.h"

namespace burst {

struct RunRecord {
  std::string name;                                          // as the page calls it
  std::vector<StepMetrics> rows;                             // metrics.jsonl
  std::vector<std::pair<std::string, std::string>> options;  // config.json: names and values
  RunFacts facts;                                            // facts.json
};

// The runs that a page shows: as many as a plot has colors.
inline constexpr int kMaxReportRuns = 6;

// Reads the folder of a run, which may still go on. An error names the file that is missing or
// cannot be read. InvalidArgument: the folder is not of a run. FailedPrecondition: the run has no
// step yet.
absl::StatusOr<RunRecord> ReadRun(const std::string& folder);

// Returns one HTML file that needs no other: a table of figures, and plots over tokens. Then come
// the planned and measured costs, the samples, and the options that differ. There must be from 1 to
// kMaxReportRuns runs.
std::string HtmlReport(const std::vector<RunRecord>& runs);

}  // namespace burst
