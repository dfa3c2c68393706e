// Measures attention alone: time, memory, bytes, and exposed communication.
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
  double forward_backward = 0;  // seconds of both in a row
};

struct AttentionMeasurement {
  AttentionTimes whole;
  AttentionTimes quiet;  // without communication
  // Times without a ring: every rank computes alone on a sequence as long as its part, once for
  // each round. All ranks do so at once, because GPUs differ by some percent.
  AttentionTimes alone;
  AttentionBytes bytes_sent;  // the bytes that all ranks sent, counted by the communicators
  int64_t peak_bytes = 0;     // a rank's memory with inputs and outputs: on the CPU the mean of all
                              // ranks, on GPUs the most
};

// Without `compare`, `quiet` and `alone` are not measured and stay 0. `processes` is as for
// RunBenchmarkRanks. The result is valid in the first rank's process.
absl::StatusOr<AttentionMeasurement> MeasureAttention(Method method,
                                                      const AttentionProblem& problem, int ranks,
                                                      int threads, int64_t repeats,
                                                      bool compare = true,
                                                      Communicator* processes = nullptr);

std::vector<ReportColumn> AttentionColumns(const ScalingOptions& options);

// Makes a row for every method, ranks, batch, seqlen and tile_keys, and calls on_row with each as
// soon as it is measured. With options.processes the rows of the first process count.
absl::StatusOr<std::vector<ReportRow>> RunAttentionExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

}  // namespace burst
