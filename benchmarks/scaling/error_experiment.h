// Measures how far attention's results are from double precision, by the number of ranks.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/scaling/options.h"
#include "benchmarks/scaling/problem.h"
#include "benchmarks/scaling/report.h"

namespace burst {

// Errors ||x - y|| / ||y||. One rank computes y on the CPU in double precision, from the same
// inputs (rounded to the problem's dtype).
struct AttentionErrors {
  double out = 0, dq = 0, dk = 0, dv = 0;
};

class ErrorReference;  // the inputs and double-precision results of one problem

absl::StatusOr<std::shared_ptr<const ErrorReference>> MakeErrorReference(
    const AttentionProblem& problem, int threads);
// Measures with tiles of `tile_keys` keys; 0 takes the kernels' own tiles.
absl::StatusOr<AttentionErrors> MeasureErrors(Method method, const ErrorReference& reference,
                                              int ranks, int threads, int64_t tile_keys = 0);

std::vector<ReportColumn> ErrorColumns(const ScalingOptions& options);

// Makes a row for every method, ranks, batch, seqlen and tile_keys, and calls on_row with each as
// soon as it is measured.
absl::StatusOr<std::vector<ReportRow>> RunErrorExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

}  // namespace burst
