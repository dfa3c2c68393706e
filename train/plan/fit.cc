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

struct Candidate {
  ResolvedConfig config;
  std::string options;
  int changes = 0;
};

// All combinations, the given one first.
std::vector<Candidate> Candidates(const ResolvedConfig& given, const Choices& choices) {
  std::vector<int64_t> stages = {given.zero};
  for (int64_t stage = 0; stage <= 3 && choices.zero && given.state_ranks() > 1; ++stage) {
    if (stage != given.zero) stages.push_back(stage);
  }
  std::vector<Recompute> recomputes = {given.recompute};
  for (Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    if (choices.recompute && recompute != given.recompute) recomputes.push_back(recompute);
  }
  const int64_t local_tokens = given.batch / given.mesh.data * given.seqlen / given.mesh.sequence;
  const bool tensor_parallel = IsTensorParallel(given.strategy) && given.mesh.sequence > 1;
  std::vector<int64_t> chunks = {given.ffn_chunk};
  if (choices.ffn_chunk && given.ffn_chunk == 0 && !tensor_parallel && local_tokens > kFfnChunk) {
    chunks.push_back(kFfnChunk);
  }
  std::vector<Candidate> candidates;
  for (const Recompute recompute : recomputes) {
    for (const int64_t chunk : chunks) {
      for (const int64_t stage : stages) {
        Candidate candidate{given, "", 0};
        candidate.config.zero = stage;
        candidate.config.recompute = recompute;
        if (recompute == Recompute::kNone) candidate.config.recompute_every = 1;
        candidate.config.ffn_chunk = chunk;
        const auto add = [&](bool changed, const std::string& option) {
          if (!changed) return;
          absl::StrAppend(&candidate.options, candidate.options.empty() ? "" : " ", option);
          ++candidate.changes;
        };
        add(recompute != given.recompute, absl::StrCat("--recompute=", Name(recompute)));
        add(chunk != given.ffn_chunk, absl::StrCat("--ffn_chunk=", chunk));
        add(stage != given.zero, absl::StrCat("--zero=", stage));
        candidates.push_back(std::move(candidate));
      }
    }
  }
  return candidates;
}

// better(a, b): whether plan a is to be preferred.
template <typename Better>
absl::StatusOr<FittedPlan> Best(const TrainingSetup& given, const GpuModel& gpu, int gpus_per_node,
                                const Choices& choices, Better better) {
  TrainingSetup setup = PlanOf(given);
  std::optional<FittedPlan> best;
  int best_changes = 0;
  for (const Candidate& candidate : Candidates(given.config, choices)) {
    setup.config = candidate.config;
    BURST_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(setup, gpu, gpus_per_node));
    const bool fits = Fits(plan, gpu);
    if (best.has_value()) {
      const bool best_fits = Fits(best->plan, gpu);
      if (best_fits && !fits) continue;
      if (best_fits == fits && !(fits ? better(plan, candidate.changes, best->plan, best_changes)
                                      : plan.peak_bytes < best->plan.peak_bytes)) {
        continue;
      }
    }
    best = FittedPlan{candidate.options, std::move(plan)};
    best_changes = candidate.changes;
  }
  return *std::move(best);
}

std::string Gib(double bytes) { return absl::StrFormat("%.1f GiB", bytes / (1 << 30)); }

}  // namespace

absl::StatusOr<FittedPlan> FitStep(const TrainingSetup& setup, const GpuModel& gpu,
                                   int gpus_per_node, const Choices& choices) {
  return Best(setup, gpu, gpus_per_node, choices,
              [](const StepPlan& a, int, const StepPlan& b, int) {
                return a.step_seconds < b.step_seconds;
              });
}

absl::Status CheckFits(const TrainingSetup& setup, const StepPlan& plan, const GpuModel& gpu,
                       int gpus_per_node) {
  if (Fits(plan, gpu)) return absl::OkStatus();
  BURST_ASSIGN_OR_RETURN(
      const FittedPlan best,
      Best(setup, gpu, gpus_per_node, {true, true, true},
           [](const StepPlan& a, int a_changes, const StepPlan& b, int b_changes) {
             return a_changes != b_changes ? a_changes < b_changes
                                           : a.step_seconds < b.step_seconds;
           }));
  const double needed = plan.peak_bytes, unplanned = kUnplannedBytes;
  const std::string error =
      absl::StrCat("a step needs ", Gib(needed), " of a GPU that has ", Gib(gpu.memory), " (",
                   Gib(unplanned), " of them for what is not planned)");
  const double least = best.plan.peak_bytes;
  if (Fits(best.plan, gpu)) {
    return absl::ResourceExhaustedError(
        absl::StrCat(error, "; with ", best.options, " it needs ", Gib(least)));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      error, best.options.empty() ? "" : absl::StrCat("; with ", best.options, " ", Gib(least)),
      "; more GPUs, a shorter --seqlen or a smaller --batch need less"));
}

}  // namespace burst
