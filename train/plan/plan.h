// Finds the memory and time of a training step without a GPU, by running the trainer's own step on
// simulated GPUs (burst/device/simulated_gpu.h). Everything that decides about memory and order is
// the code that trains; only kernels and links are models.
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

// The plan of the rank that needs most, in bytes and seconds.
struct StepPlan {
  int64_t parameters = 0, gradients = 0, optimizer = 0;  // kept between steps
  int64_t peak_bytes = 0;                                // within a step, those included
  int64_t largest_tensor = 0;                            // that a step allocates, in bytes
  // Page-locked memory of the host: offloaded tensors, and the copy of the state that a save takes.
  // The mean of all ranks, which share a host's memory: rank 0 may be the only one that saves.
  int64_t host_bytes = 0;
  template <typename T>
  struct Part {
    std::string place;  // what takes it: "forward, attention"
    T amount = 0;
  };
  std::vector<Part<int64_t>> at_peak;  // of peak_bytes; largest first

  double step_seconds = 0;
  double kernel_seconds = 0;              // of the busiest rank, in which kernels run
  std::vector<Part<double>> by_place;     // of kernel_seconds; largest first
  double tokens_per_second = 0;           // a GPU
  std::optional<double> pipeline_bubble;  // StepMetrics'
};

// Ranks of a plan, at most: each is a thread, with masks of its own.
constexpr int kMostPlannedRanks = 256;

// Memory that a plan does not see: of the communication library, of kernels that need scratch for a
// moment, and of gaps between allocations. These are at most as large as a step's largest tensor,
// which is what a gap is too small for.
constexpr int64_t kUnplannedBytes = int64_t{1} << 30;
inline int64_t UnplannedBytes(const StepPlan& plan) {
  return std::max(kUnplannedBytes, plan.largest_tensor);
}

// A setup for plans: the data of the run; or, where the model says its own vocabulary and attention
// does not end at documents, none.
absl::StatusOr<TrainingSetup> PreparePlan(const ResolvedConfig& config);
TrainingSetup PlanOf(const TrainingSetup& run);

// `setup`: one of the above; the config's device is cuda. `gpus_per_node`: that fast links connect;
// 0: all.
absl::StatusOr<StepPlan> PlanStep(const TrainingSetup& setup, const GpuModel& gpu,
                                  int gpus_per_node);

inline bool Fits(const StepPlan& plan, const GpuModel& gpu) {
  return static_cast<double>(plan.peak_bytes + UnplannedBytes(plan)) <= gpu.memory &&
         static_cast<double>(plan.host_bytes) <= gpu.host_memory;
}

// Whether `plan` is the better one: the faster of two that fit, the one that fits, or the smaller
// of two that do not.
inline bool IsBetter(const StepPlan& plan, const StepPlan& than, const GpuModel& gpu) {
  const bool fits = Fits(plan, gpu);
  if (fits != Fits(than, gpu)) return fits;
  return fits ? plan.step_seconds < than.step_seconds : plan.peak_bytes < than.peak_bytes;
}

}  // namespace burst
