#include "train/plan/fit.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr int64_t kFfnChunk = 16384;  // tokens: long enough for GEMMs at their full rate

constexpr int kOptions = 4;  // that may be changed

struct Candidate {
  ResolvedConfig config;
  std::string options;
  int changes = 0;
};

// What may be chosen for each option, by growing time and shrinking memory.
struct Ranges {
  std::vector<Recompute> recomputes;
  std::vector<int64_t> chunks, stages;
  std::vector<Offload> offloads;
};

Ranges RangesOf(const ResolvedConfig& given, const Choices& choices) {
  Ranges ranges{{given.recompute}, {given.ffn_chunk}, {given.zero}, {given.offload}};
  if (choices.recompute) {
    ranges.recomputes = {Recompute::kNone, Recompute::kSelective, Recompute::kFull};
  }
  const int64_t local_tokens = given.batch / given.mesh.data * given.seqlen / given.mesh.sequence;
  const bool tensor_parallel = IsTensorParallel(given.strategy) && given.mesh.sequence > 1;
  if (choices.ffn_chunk && given.ffn_chunk == 0 && !tensor_parallel && local_tokens > kFfnChunk) {
    ranges.chunks.push_back(kFfnChunk);
  }
  if (choices.zero && given.state_ranks() > 1) ranges.stages = {0, 1, 2, 3};
  if (choices.offload) ranges.offloads = {Offload::kNone, Offload::kActivations};
  return ranges;
}

// Without recomputation nothing is offloaded.
Candidate MakeCandidate(const ResolvedConfig& given, Recompute recompute, int64_t chunk,
                        int64_t stage, Offload offload) {
  Candidate candidate{given, "", 0};
  candidate.config.recompute = recompute;
  if (recompute == Recompute::kNone) {
    candidate.config.recompute_every = 1;
    offload = Offload::kNone;
  }
  candidate.config.offload = offload;
  candidate.config.ffn_chunk = chunk;
  candidate.config.zero = stage;
  const auto add = [&](bool changed, const std::string& option) {
    if (!changed) return;
    absl::StrAppend(&candidate.options, candidate.options.empty() ? "" : " ", option);
    ++candidate.changes;
  };
  add(recompute != given.recompute, absl::StrCat("--recompute=", Name(recompute)));
  add(chunk != given.ffn_chunk, absl::StrCat("--ffn_chunk=", chunk));
  add(stage != given.zero, absl::StrCat("--zero=", stage));
  add(offload != given.offload, absl::StrCat("--offload=", Name(offload)));
  return candidate;
}

absl::StatusOr<FittedPlan> PlanCandidate(const TrainingSetup& setup, const GpuModel& gpu,
                                         int gpus_per_node, const Candidate& candidate) {
  TrainingSetup changed = PlanOf(setup);
  changed.config = candidate.config;
  BURST_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(changed, gpu, gpus_per_node));
  return FittedPlan{candidate.options, std::move(plan)};
}

std::string Gib(double bytes) { return absl::StrFormat("%.1f GiB", bytes / (1 << 30)); }

}  // namespace

// More recomputation takes more time, whatever the rest; so the first kind of it with a step that
// fits has the fastest one. Of a kind, the largest stage and chunks need least memory, offloaded.
absl::StatusOr<FittedPlan> FitStep(const TrainingSetup& setup, const GpuModel& gpu,
                                   int gpus_per_node, const Choices& choices) {
  const Ranges ranges = RangesOf(setup.config, choices);
  std::optional<FittedPlan> best;
  for (const Recompute recompute : ranges.recomputes) {
    const auto plan = [&](int64_t chunk, int64_t stage, Offload offload) {
      return PlanCandidate(setup, gpu, gpus_per_node,
                           MakeCandidate(setup.config, recompute, chunk, stage, offload));
    };
    BURST_ASSIGN_OR_RETURN(
        best, plan(ranges.chunks.back(), ranges.stages.back(), ranges.offloads.back()));
    if (!Fits(best->plan, gpu)) continue;
    for (const Offload offload : ranges.offloads) {
      if (recompute == Recompute::kNone && offload != ranges.offloads.front()) continue;
      for (const int64_t chunk : ranges.chunks) {
        for (const int64_t stage : ranges.stages) {
          BURST_ASSIGN_OR_RETURN(FittedPlan other, plan(chunk, stage, offload));
          if (!Fits(other.plan, gpu)) continue;
          if (other.plan.step_seconds < best->plan.step_seconds) best = std::move(other);
        }
      }
    }
    break;
  }
  return *std::move(best);
}

absl::Status CheckFits(const TrainingSetup& setup, const StepPlan& plan, const GpuModel& gpu,
                       int gpus_per_node) {
  if (Fits(plan, gpu)) return absl::OkStatus();
  const double needed = plan.peak_bytes, unplanned = kUnplannedBytes;
  const std::string error =
      absl::StrCat("a step needs ", Gib(needed), " of a GPU that has ", Gib(gpu.memory), " (",
                   Gib(unplanned), " of them for what is not planned)");

  const Ranges ranges = RangesOf(setup.config, {true, true, true, true});
  const Candidate smallest =
      MakeCandidate(setup.config, ranges.recomputes.back(), ranges.chunks.back(),
                    ranges.stages.back(), ranges.offloads.back());
  BURST_ASSIGN_OR_RETURN(const FittedPlan least,
                         PlanCandidate(setup, gpu, gpus_per_node, smallest));
  if (!Fits(least.plan, gpu)) {
    const std::string at_least = least.options.empty() ? ""
                                                       : absl::StrCat("; with ", least.options, " ",
                                                                      Gib(least.plan.peak_bytes));
    return absl::ResourceExhaustedError(absl::StrCat(
        error, at_least, "; more GPUs, a shorter --seqlen or a smaller --batch need less"));
  }
  for (int changes = 1; changes <= kOptions; ++changes) {
    std::optional<FittedPlan> best;
    for (const Recompute recompute : ranges.recomputes) {
      for (const int64_t chunk : ranges.chunks) {
        for (const int64_t stage : ranges.stages) {
          for (const Offload offload : ranges.offloads) {
            if (recompute == Recompute::kNone && offload != Offload::kNone) continue;
            const Candidate candidate =
                MakeCandidate(setup.config, recompute, chunk, stage, offload);
            if (candidate.changes != changes) continue;
            BURST_ASSIGN_OR_RETURN(FittedPlan other,
                                   PlanCandidate(setup, gpu, gpus_per_node, candidate));
            if (!Fits(other.plan, gpu)) continue;
            if (!best.has_value() || other.plan.step_seconds < best->plan.step_seconds) {
              best = std::move(other);
            }
          }
        }
      }
    }
    if (best.has_value()) {
      return absl::ResourceExhaustedError(
          absl::StrCat(error, "; with ", best->options, " it needs ", Gib(best->plan.peak_bytes)));
    }
  }
  return absl::ResourceExhaustedError(error);
}

}  // namespace burst
