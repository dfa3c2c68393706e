#include "train/plan/fit.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "burst/base/status.h"
#include "train/config/conflicts.h"

namespace burst {
namespace {

// Time for the search for the fewest changes. After it, the search returns what is known to fit.
constexpr std::chrono::seconds kMostSearch{30};

struct Candidate {
  ResolvedConfig config;
  std::string options;
  size_t changes = 0;
};

Candidate MakeCandidate(const ResolvedConfig& given, ResolvedConfig config) {
  const std::vector<std::string> options = config.ChangesFrom(given);
  return {std::move(config), absl::StrJoin(options, " "), options.size()};
}

Candidate MakeCandidate(const ResolvedConfig& given, const Recomputation& recompute,
                        const SetOptions& chunks, int64_t stage, Offload offload) {
  ResolvedConfig config = given;
  recompute.Set(&config);
  chunks(&config);
  config.offload = offload;
  config.zero = stage;
  config.ResolveCheckpointFiles();
  return MakeCandidate(given, std::move(config));
}

absl::StatusOr<FittedPlan> PlanCandidate(const TrainingSetup& setup, const GpuModel& gpu,
                                         int gpus_per_node, const Candidate& candidate) {
  TrainingSetup changed = PlanOf(setup);
  changed.config = candidate.config;
  BURST_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(changed, gpu, gpus_per_node));
  return FittedPlan{candidate.options, candidate.config, std::move(plan)};
}

// Plans again with as many GiB of an offloaded optimizer on the GPU as have room. `plan` is of
// `config`, and may leave memory or need too much. Returns nullopt if the new plan is not better.
absl::StatusOr<std::optional<FittedPlan>> FillWithResidents(const TrainingSetup& setup,
                                                            const GpuModel& gpu, int gpus_per_node,
                                                            ResolvedConfig config,
                                                            const StepPlan& plan) {
  const auto used = static_cast<double>(plan.peak_bytes + UnplannedBytes(plan));
  const auto left = static_cast<int64_t>(std::floor((gpu.memory - used) / (1 << 30)));
  if (!OffloadsOptimizer(config.offload) || left == 0 || config.offload_resident + left < 0) {
    return std::nullopt;
  }
  config.offload_resident += left;
  BURST_ASSIGN_OR_RETURN(
      FittedPlan filled,
      PlanCandidate(setup, gpu, gpus_per_node, MakeCandidate(setup.config, std::move(config))));
  if (!Fits(filled.plan, gpu) || !IsBetter(filled.plan, plan, gpu)) return std::nullopt;
  return filled;
}

using Planner = std::function<absl::StatusOr<FittedPlan>(const Candidate&)>;

// Returns the first plan that fits with the most recomputation and the largest ZeRO stage, or the
// one that needs least memory.
absl::StatusOr<FittedPlan> LeastMemory(const ResolvedConfig& given, const MemoryChoices& choices,
                                       const GpuModel& gpu, const Planner& plan_of) {
  std::optional<FittedPlan> least;
  for (const Recomputation& recompute : choices.recomputes) {
    if (recompute.kind != choices.recomputes.back().kind) continue;
    for (const Offload offload : choices.offloads) {
      for (const SetOptions& chunks : choices.chunks) {
        if (least.has_value() && Fits(least->plan, gpu)) return *std::move(least);
        if (recompute.segment > 1 && &chunks != &choices.chunks.back()) continue;
        const Candidate candidate =
            MakeCandidate(given, recompute, chunks, choices.stages.back(), offload);
        if (!Allowed(candidate.config)) continue;
        BURST_ASSIGN_OR_RETURN(FittedPlan other, plan_of(candidate));
        if (!least.has_value() || IsBetter(other.plan, least->plan, gpu)) least = std::move(other);
      }
    }
  }
  return *std::move(least);
}

// Returns all candidates without conflicts; those with fewer changes come first.
std::vector<Candidate> ByChanges(const ResolvedConfig& given, const MemoryChoices& choices) {
  std::vector<Candidate> candidates;
  for (const Recomputation& recompute : choices.recomputes) {
    for (const SetOptions& chunks : choices.chunks) {
      for (const int64_t stage : choices.stages) {
        for (const Offload offload : choices.offloads) {
          Candidate candidate = MakeCandidate(given, recompute, chunks, stage, offload);
          if (Allowed(candidate.config)) candidates.push_back(std::move(candidate));
        }
      }
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.changes < b.changes; });
  return candidates;
}

// Returns the fastest of the plans that fit with the fewest changes; none if the search takes too
// long.
absl::StatusOr<std::optional<FittedPlan>> FewestChanges(const ResolvedConfig& given,
                                                        const MemoryChoices& choices,
                                                        const GpuModel& gpu,
                                                        const Planner& plan_of) {
  const auto deadline = std::chrono::steady_clock::now() + kMostSearch;
  std::optional<FittedPlan> best;
  size_t changes = 0;  // the best one's number
  for (const Candidate& candidate : ByChanges(given, choices)) {
    if (candidate.changes == 0) continue;
    if (best.has_value() && candidate.changes > changes) break;
    if (std::chrono::steady_clock::now() >= deadline) break;
    BURST_ASSIGN_OR_RETURN(FittedPlan other, plan_of(candidate));
    if (!Fits(other.plan, gpu)) continue;
    if (!best.has_value() || other.plan.step_seconds < best->plan.step_seconds) {
      best = std::move(other);
      changes = candidate.changes;
    }
  }
  return best;
}

std::string Gib(double bytes) { return absl::StrFormat("%.1f GiB", bytes / (1 << 30)); }

// Describes the memory that a plan needs on the GPU, and on the host if the host has too little.
std::string Amounts(const StepPlan& plan, const GpuModel& gpu) {
  const std::string amount = Gib(static_cast<double>(plan.peak_bytes));
  const auto host = static_cast<double>(plan.host_bytes);
  if (host <= gpu.host_memory) return amount;
  return absl::StrCat(amount, " and ", Gib(host), " of the host's memory");
}

std::string Needs(const StepPlan& plan, const GpuModel& gpu) {
  const auto unplanned = static_cast<double>(UnplannedBytes(plan));
  std::string text = absl::StrCat(Gib(static_cast<double>(plan.peak_bytes)), " of a GPU that has ",
                                  Gib(gpu.memory), ", of which ", Gib(unplanned),
                                  " are kept for what is not planned");
  const auto host = static_cast<double>(plan.host_bytes);
  if (host <= gpu.host_memory) return text;
  return absl::StrCat(text, " and ", Gib(host), " of the host's memory, which has ",
                      Gib(gpu.host_memory), " for each GPU");
}

absl::Status WithOptions(const std::string& error, const FittedPlan& fitted, const GpuModel& gpu) {
  return absl::ResourceExhaustedError(
      absl::StrCat(error, "; with ", fitted.options, " it needs ", Amounts(fitted.plan, gpu)));
}

}  // namespace

// With equal chunks, more recomputation takes more time, except for an offloaded optimizer. So once
// a step fits without one, more recomputation is tried with fewer chunks only: they recompute, too.
// The largest stage needs least memory.
absl::StatusOr<FittedPlan> FitStep(const TrainingSetup& setup, const GpuModel& gpu,
                                   int gpus_per_node, const MayChoose& may_choose) {
  const MemoryChoices choices = MemoryChoicesOf(setup.config, may_choose);
  std::optional<FittedPlan> best;  // or the smallest one, while none fits
  // Returns whether the candidate fits.
  const auto consider = [&](const Candidate& candidate) -> absl::StatusOr<bool> {
    BURST_ASSIGN_OR_RETURN(FittedPlan fitted, PlanCandidate(setup, gpu, gpus_per_node, candidate));
    const bool fits = Fits(fitted.plan, gpu);
    if (fits && may_choose("offload_resident")) {
      BURST_ASSIGN_OR_RETURN(
          auto filled, FillWithResidents(setup, gpu, gpus_per_node, candidate.config, fitted.plan));
      if (filled.has_value()) fitted = *std::move(filled);
    }
    if (!best.has_value() || IsBetter(fitted.plan, best->plan, gpu)) best = std::move(fitted);
    return fits;
  };
  size_t tried = choices.chunks.size();  // chunks to try, from the first
  for (const Recomputation& recompute : choices.recomputes) {
    const auto make = [&](const SetOptions& chunks, int64_t stage, Offload offload) {
      return MakeCandidate(setup.config, recompute, chunks, stage, offload);
    };
    size_t fitting = tried;  // the first chunks with which a step fits
    for (const Offload offload : choices.offloads) {
      // An offloaded optimizer costs time that nothing here saves.
      if (fitting < choices.chunks.size() && OffloadsOptimizer(offload)) break;
      for (size_t i = 0; i < tried; ++i) {
        const SetOptions& chunks = choices.chunks[i];
        const Candidate smallest = make(chunks, choices.stages.back(), offload);
        if (!Allowed(smallest.config)) continue;
        BURST_ASSIGN_OR_RETURN(const bool fits, consider(smallest));
        if (!fits) continue;
        if (!OffloadsOptimizer(offload)) fitting = std::min(fitting, i);
        for (const int64_t stage : choices.stages) {
          if (stage == choices.stages.back()) continue;
          const Candidate candidate = make(chunks, stage, offload);
          if (!Allowed(candidate.config)) continue;
          BURST_RETURN_IF_ERROR(consider(candidate).status());
        }
      }
    }
    tried = fitting;
    if (tried == 0) break;
  }
  return *std::move(best);
}

absl::Status CheckFits(const TrainingSetup& setup, const StepPlan& plan, const GpuModel& gpu,
                       int gpus_per_node) {
  if (Fits(plan, gpu)) return absl::OkStatus();
  const std::string error = absl::StrCat("a step needs ", Needs(plan, gpu));
  BURST_ASSIGN_OR_RETURN(const auto fewer,
                         FillWithResidents(setup, gpu, gpus_per_node, setup.config, plan));
  if (fewer.has_value()) return WithOptions(error, *fewer, gpu);
  const MemoryChoices choices =
      MemoryChoicesOf(setup.config, [](absl::string_view) { return true; });
  const auto plan_of = [&](const Candidate& candidate) {
    return PlanCandidate(setup, gpu, gpus_per_node, candidate);
  };
  BURST_ASSIGN_OR_RETURN(FittedPlan least, LeastMemory(setup.config, choices, gpu, plan_of));
  if (!Fits(least.plan, gpu)) {
    const std::string at_least = least.options.empty() ? ""
                                                       : absl::StrCat("; with ", least.options, " ",
                                                                      Amounts(least.plan, gpu));
    return absl::ResourceExhaustedError(absl::StrCat(
        error, at_least, "; more GPUs, a shorter --seqlen or a smaller --batch need less"));
  }
  BURST_ASSIGN_OR_RETURN(std::optional<FittedPlan> fewest,
                         FewestChanges(setup.config, choices, gpu, plan_of));
  if (fewest.has_value()) least = *std::move(fewest);
  BURST_ASSIGN_OR_RETURN(const auto filled,
                         FillWithResidents(setup, gpu, gpus_per_node, least.config, least.plan));
  return WithOptions(error, filled.has_value() ? *filled : least, gpu);
}

}  // namespace burst
