// Finds the memory and time of a training step without a GPU, by running the trainer's own step on
// simulated GPUs (burst/device/simulated_gpu.h). The code that trains decides about memory and
// order; only kernels and links are models.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/device/simulated_gpu.h"
#include "train/config/config.h"
#include "train/run/setup.h"

namespace burst {

// The plan of the rank that needs the most, in bytes and seconds.
struct StepPlan {
  int64_t parameters = 0, gradients = 0, optimizer = 0;  // kept between steps
  int64_t peak_bytes = 0;      // the peak of a step, all of these included
  int64_t largest_tensor = 0;  // the largest allocation of a step
  // Page-locked memory of the host: offloaded tensors, and a save's copy of the state. It is the
  // mean of all ranks, because they share a host's memory and rank 0 may be the only one that
  // saves.
  int64_t host_bytes = 0;
  template <typename T>
  struct Part {
    std::string place;  // such as "forward, attention"
    T amount = 0;
  };
  std::vector<Part<int64_t>> at_peak;  // parts of peak_bytes, largest first

  double step_seconds = 0;
  double kernel_seconds = 0;              // the time of kernels on the busiest rank
  std::vector<Part<double>> by_place;     // parts of kernel_seconds, largest first
  double tokens_per_second = 0;           // for each GPU
  std::optional<double> pipeline_bubble;  // as in StepMetrics
};

// The most ranks of a plan. Each is a thread.
constexpr int kMostPlannedRanks = 256;

// Memory that a plan does not see: for the communication library, for kernels' scratch, and in gaps
// between allocations. A gap is smaller than a step's largest tensor.
constexpr int64_t kUnplannedBytes = int64_t{1} << 30;
inline int64_t UnplannedBytes(const StepPlan& plan) {
  return std::max(kUnplannedBytes, plan.largest_tensor);
}

// Returns a setup for plans. It has the run's data, unless the model has its own vocabulary and
// attention does not end at documents.
absl::StatusOr<TrainingSetup> PreparePlan(const ResolvedConfig& config);
TrainingSetup PlanOf(const TrainingSetup& run);

// Plans a step. `setup` is from PreparePlan or the run; its device is cuda. Fast links connect
// `gpus_per_node` GPUs; 0: all.
absl::StatusOr<StepPlan> PlanStep(const TrainingSetup& setup, const GpuModel& gpu,
                                  int gpus_per_node);

inline bool Fits(const StepPlan& plan, const GpuModel& gpu) {
  return static_cast<double>(plan.peak_bytes + UnplannedBytes(plan)) <= gpu.memory &&
         static_cast<double>(plan.host_bytes) <= gpu.host_memory;
}

// Returns whether `plan` is the better one: the faster of two that fit, the one that fits, or the
// smaller of two that do not.
inline bool IsBetter(const StepPlan& plan, const StepPlan& than, const GpuModel& gpu) {
  const bool fits = Fits(plan, gpu);
  if (fits != Fits(than, gpu)) return fits;
  return fits ? plan.step_seconds < than.step_seconds : plan.peak_bytes < than.peak_bytes;
}

}  // namespace burst
