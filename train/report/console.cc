#include "train/report/console.h"

#include <poll.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

// printf would show the sign bit of NaN.
double WithoutSignOfNan(double x) { return std::isnan(x) ? std::abs(x) : x; }

// Returns whether standard output takes a line at once. While mpirun ends a job it reads nothing. A
// rank that waited for it would be killed before it has saved.
bool TakesOutput() {
  pollfd out = {STDOUT_FILENO, POLLOUT, 0};
  return poll(&out, 1, /*timeout=*/0) == 1;
}

}  // namespace

Console::Console(int64_t steps, int64_t log_every, const Throughput& throughput)
    : steps_(steps),
      log_every_(log_every),
      throughput_(throughput),
      is_terminal_(isatty(STDOUT_FILENO) != 0) {}

void Console::Table(absl::string_view title,
                    const std::vector<std::pair<std::string, std::string>>& rows) {
  Print(title);
  for (const auto& [name, value] : rows) Print(absl::StrFormat("  %-12s%s", name, value));
  Print("");
}

void Console::Step(const StepMetrics& metrics) {
  const auto now = std::chrono::steady_clock::now();
  if (first_step_ < 0) first_step_ = metrics.step, start_ = now;
  // The first steps warm up caches and pools. Later steps are averaged.
  const double keep = metrics.step - first_step_ < 3 ? 0 : 0.9;
  smoothed_tokens_per_second_ =
      keep * smoothed_tokens_per_second_ + (1 - keep) * metrics.tokens_per_second;
  if (is_terminal_) {
    if (!TakesOutput()) return;
    printf("\r\033[K%s", Progress(metrics).c_str());
    line_open_ = true;
    fflush(stdout);
  } else if (metrics.step == first_step_ || metrics.step % log_every_ == 0 ||
             metrics.step == steps_) {
    Print(Progress(metrics));
  }
}

std::string Console::Progress(const StepMetrics& metrics) const {
  std::string line = absl::StrFormat("step %*d/%d  loss %.4f  lr %.2e  grad %.3f  %s tok/s",
                                     static_cast<int>(absl::StrCat(steps_).size()), metrics.step,
                                     steps_, WithoutSignOfNan(metrics.loss), metrics.lr,
                                     WithoutSignOfNan(metrics.grad_norm),
                                     Thousands(static_cast<int64_t>(smoothed_tokens_per_second_)));
  if (throughput_.peak_flops > 0) {
    const double per_flop = 100 * smoothed_tokens_per_second_ / throughput_.peak_flops;
    absl::StrAppendFormat(&line, "  MFU %.1f%% (causal %.1f%%)",
                          per_flop * throughput_.flops_per_token.full,
                          per_flop * throughput_.flops_per_token.causal);
  }
  if (metrics.pipeline_bubble.has_value()) {
    absl::StrAppendFormat(&line, "  bubble %.1f%%", 100 * *metrics.pipeline_bubble);
  }
  const int64_t done = metrics.step - first_step_;
  if (done > 0) {
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start_;
    absl::StrAppend(&line, "  left ",
                    ShortDuration(elapsed.count() / static_cast<double>(done) *
                                  static_cast<double>(steps_ - metrics.step)));
  }
  return line;
}

void Console::Print(absl::string_view line) {
  if (line_open_) printf("\n");
  line_open_ = false;
  printf("%.*s\n", static_cast<int>(line.size()), line.data());
  fflush(stdout);
}

}  // namespace burst
