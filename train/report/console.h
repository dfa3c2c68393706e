// Prints a run: a table of its configuration, then a live line. On a terminal the line is rewritten
// in place; elsewhere it is printed now and then.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "model/transformer.h"
#include "train/report/metrics.h"

namespace burst {

// The peak with which a step's arithmetic is compared.
struct Throughput {
  Transformer::FlopsPerToken flops_per_token;
  double peak_flops = 0;  // FLOP/s of all ranks together; 0: unknown
};

class Console {
 public:
  Console(int64_t steps, int64_t log_every, const Throughput& throughput);

  void Table(absl::string_view title, const std::vector<std::pair<std::string, std::string>>& rows);
  // Prints the live line.
  void Step(const StepMetrics& metrics);
  // Prints a line that stays.
  void Print(absl::string_view line);

 private:
  std::string Progress(const StepMetrics& metrics) const;

  const int64_t steps_, log_every_;
  const Throughput throughput_;
  const bool is_terminal_;
  bool line_open_ = false;  // the live line is on the screen
  int64_t first_step_ = -1;
  std::chrono::steady_clock::time_point start_;  // the start of the first step shown
  double smoothed_tokens_per_second_ = 0;
};

}  // namespace burst
