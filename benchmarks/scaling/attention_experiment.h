// Attention alone: time, memory, bytes, and what of the communication was not hidden.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/scaling/options.h"
#include "benchmarks/scaling/problem.h"
#include "benchmarks/scaling/report.h"

namespace burst {

struct AttentionTimes {
  double forward = 0;           // seconds of the slowest rank, in the median repetition
  double forward_backward = 0;  // of both in a row
};

struct AttentionMeasurement {
  AttentionTimes whole;
  AttentionTimes quiet;  // with communication left out
  // Without a ring: every rank computes alone on a sequence as long as its part, once for each
  // round. All ranks do so at once, since GPUs differ by percents.
  AttentionTimes alone;
  AttentionBytes bytes_sent;  // by all ranks together, counted by the communicators
  int64_t peak_bytes = 0;     // of a rank, inputs and outputs included: on the CPU the mean of all
                              // ranks, on GPUs the most
};

// Without `compare`, `quiet` and `alone` are not measured and stay 0. `processes` as for
// RunBenchmarkRanks. The result is the one of the first rank's process.
absl::StatusOr<AttentionMeasurement> MeasureAttention(Method method,
                                                      const AttentionProblem& problem, int ranks,
                                                      int threads, int64_t repeats,
                                                      bool compare = true,
                                                      Communicator* processes = nullptr);

std::vector<ReportColumn> AttentionColumns(const ScalingOptions& options);

// A row for every method, ranks, batch, seqlen and tile_keys; calls on_row with each as soon as
// it is measured. With options.processes the rows of the first process count.
absl::StatusOr<std::vector<ReportRow>> RunAttentionExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

}  // namespace burst
