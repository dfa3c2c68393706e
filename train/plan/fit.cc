#include "train/plan/fit.h"

#include <algorithm>
#include <chrono>
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

constexpr int64_t kFfnChunk = 16384;  // tokens: long enough for GEMMs at their full rate

// Time for the search for the fewest changes. After it, the search returns what is known to fit.
constexpr std::chrono::seconds kMostSearch{30};

struct Candidate {
  ResolvedConfig config;
  std::string options;
  size_t changes = 0;
};

struct Recomputation {
  Recompute kind = Recompute::kNone;
  int64_t segment = 1;
};

struct Chunks {
  int64_t ffn = 0, heads = 0;
  bool operator==(const Chunks& other) const { return ffn == other.ffn && heads == other.heads; }
};

// The choices of each option, by growing time and shrinking memory. For segments the memory is the
// host's, with offloaded activations.
struct Ranges {
  std::vector<Recomputation> recomputes;
  std::vector<Chunks> chunks;
  std::vector<int64_t> stages;
  std::vector<Offload> offloads;
};

// Returns the fewest KV heads that attention can take at a time, which is the number that Ulysses
// divides.
int64_t FewestKvHeads(const ResolvedConfig& config) {
  const int64_t kv_heads = config.model.WithDefaults().kv_heads;
  const int64_t ranks = config.strategy == Strategy::kUlysses        ? config.mesh.sequence
                        : config.strategy == Strategy::kBurstUlysses ? config.ulysses
                                                                     : 1;
  return kv_heads % ranks == 0 ? ranks : kv_heads;
}

// Returns the values with which `given`, changed by set(value, config), has no conflict.
template <typename T, typename Set>
std::vector<T> AllowedOf(const ResolvedConfig& given, const std::vector<T>& values,
                         const Set& set) {
  std::vector<T> allowed;
  for (const T& value : values) {
    ResolvedConfig config = given;
    set(value, &config);
    if (Allowed(config)) allowed.push_back(value);
  }
  return allowed;
}

void SetRecomputation(const Recomputation& value, ResolvedConfig* config) {
  config->recompute = value.kind;
  config->recompute_segment = value.segment;
}

void SetChunks(const Chunks& value, ResolvedConfig* config) {
  config->ffn_chunk = value.ffn;
  config->head_chunk = value.heads;
}

// Returns the choices of each option by itself. A choice helps, and has no conflict with the
// options that are fixed.
Ranges RangesOf(const ResolvedConfig& given, const MayChoose& may_choose) {
  Ranges ranges{{{given.recompute, given.recompute_segment}},
                {{given.ffn_chunk, given.head_chunk}},
                {given.zero},
                {given.offload}};
  ResolvedConfig fixed = given;  // the options without those that may be chosen
  if (may_choose("offload")) fixed.offload = Offload::kNone;
  if (may_choose("recompute") && may_choose("recompute_segment")) {
    SetRecomputation({Recompute::kFull}, &fixed);
    ranges.recomputes = {
        {Recompute::kNone}, {Recompute::kSelective}, {Recompute::kSequence}, {Recompute::kFull}};
    for (int64_t segment = 2; 2 * segment <= given.model.layers && segment <= 8; segment *= 2) {
      ranges.recomputes.push_back({Recompute::kFull, segment});
    }
    ranges.recomputes = AllowedOf(fixed, ranges.recomputes, SetRecomputation);
  }
  const int64_t local_tokens = given.batch / given.mesh.data * given.seqlen / given.mesh.sequence;
  if (may_choose("ffn_chunk") && given.ffn_chunk == 0 && local_tokens > kFfnChunk) {
    ranges.chunks.push_back({kFfnChunk, given.head_chunk});
    ranges.chunks = AllowedOf(fixed, ranges.chunks, SetChunks);
  }
  const int64_t fewest = FewestKvHeads(given);
  if (may_choose("head_chunk") && given.head_chunk == 0 &&
      fewest < given.model.WithDefaults().kv_heads) {
    ranges.chunks.push_back({ranges.chunks.back().ffn, fewest});
    ranges.chunks = AllowedOf(fixed, ranges.chunks, SetChunks);
  }
  if (may_choose("zero")) {
    ranges.stages = AllowedOf(fixed, std::vector<int64_t>{0, 1, 2, 3},
                              [](int64_t stage, ResolvedConfig* c) { c->zero = stage; });
  }
  if (may_choose("offload")) {
    ranges.offloads = AllowedOf(fixed,
                                std::vector<Offload>{Offload::kNone, Offload::kActivations,
                                                     Offload::kOptimizer, Offload::kAll},
                                [](Offload offload, ResolvedConfig* c) { c->offload = offload; });
  }
  return ranges;
}

Candidate MakeCandidate(const ResolvedConfig& given, const Recomputation& recompute,
                        const Chunks& chunks, int64_t stage, Offload offload) {
  Candidate candidate{given, "", 0};
  SetRecomputation(recompute, &candidate.config);
  SetChunks(chunks, &candidate.config);
  candidate.config.offload = offload;
  candidate.config.zero = stage;
  const std::vector<std::string> options = candidate.config.ChangesFrom(given);
  candidate.options = absl::StrJoin(options, " ");
  candidate.changes = options.size();
  return candidate;
}

absl::StatusOr<FittedPlan> PlanCandidate(const TrainingSetup& setup, const GpuModel& gpu,
                                         int gpus_per_node, const Candidate& candidate) {
  TrainingSetup changed = PlanOf(setup);
  changed.config = candidate.config;
  BURST_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(changed, gpu, gpus_per_node));
  return FittedPlan{candidate.options, std::move(plan)};
}

using Planner = std::function<absl::StatusOr<FittedPlan>(const Candidate&)>;

// Returns the first plan that fits with the most recomputation and the largest ZeRO stage, or the
// one that needs least memory.
absl::StatusOr<FittedPlan> LeastMemory(const ResolvedConfig& given, const Ranges& ranges,
                                       const GpuModel& gpu, const Planner& plan_of) {
  std::optional<FittedPlan> least;
  for (const Recomputation& recompute : ranges.recomputes) {
    if (recompute.kind != ranges.recomputes.back().kind) continue;
    for (const Offload offload : ranges.offloads) {
      for (const Chunks& chunks : ranges.chunks) {
        if (least.has_value() && Fits(least->plan, gpu)) return *std::move(least);
        if (recompute.segment > 1 && !(chunks == ranges.chunks.back())) continue;
        const Candidate candidate =
            MakeCandidate(given, recompute, chunks, ranges.stages.back(), offload);
        if (!Allowed(candidate.config)) continue;
        BURST_ASSIGN_OR_RETURN(FittedPlan other, plan_of(candidate));
        if (!least.has_value() || IsBetter(other.plan, least->plan, gpu)) least = std::move(other);
      }
    }
  }
  return *std::move(least);
}

// Returns all candidates without conflicts; those with fewer changes come first.
std::vector<Candidate> ByChanges(const ResolvedConfig& given, const Ranges& ranges) {
  std::vector<Candidate> candidates;
  for (const Recomputation& recompute : ranges.recomputes) {
    for (const Chunks& chunks : ranges.chunks) {
      for (const int64_t stage : ranges.stages) {
        for (const Offload offload : ranges.offloads) {
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
                                                        const Ranges& ranges, const GpuModel& gpu,
                                                        const Planner& plan_of) {
  const auto deadline = std::chrono::steady_clock::now() + kMostSearch;
  std::optional<FittedPlan> best;
  size_t changes = 0;  // the best one's number
  for (const Candidate& candidate : ByChanges(given, ranges)) {
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
  std::string text =
      absl::StrCat(Gib(static_cast<double>(plan.peak_bytes)), " of a GPU that has ",
                   Gib(gpu.memory), " (", Gib(unplanned), " of them for what is not planned)");
  const auto host = static_cast<double>(plan.host_bytes);
  if (host <= gpu.host_memory) return text;
  return absl::StrCat(text, " and ", Gib(host), " of the host's memory, which has ",
                      Gib(gpu.host_memory), " for each GPU");
}

}  // namespace

// With equal chunks, more recomputation takes more time, except for an offloaded optimizer. So once
// a step fits without one, more recomputation is tried with fewer chunks only: they recompute, too.
// The largest stage needs least memory.
absl::StatusOr<FittedPlan> FitStep(const TrainingSetup& setup, const GpuModel& gpu,
                                   int gpus_per_node, const MayChoose& may_choose) {
  const Ranges ranges = RangesOf(setup.config, may_choose);
  std::optional<FittedPlan> best;  // or the smallest one, while none fits
  const auto consider = [&](FittedPlan other) {
    const bool fits = Fits(other.plan, gpu);
    if (!best.has_value() || IsBetter(other.plan, best->plan, gpu)) best = std::move(other);
    return fits;
  };
  size_t tried = ranges.chunks.size();  // chunks to try, from the first
  for (const Recomputation& recompute : ranges.recomputes) {
    const auto make = [&](const Chunks& chunks, int64_t stage, Offload offload) {
      return MakeCandidate(setup.config, recompute, chunks, stage, offload);
    };
    const auto plan = [&](const Candidate& candidate) {
      return PlanCandidate(setup, gpu, gpus_per_node, candidate);
    };
    size_t fitting = tried;  // the first chunks with which a step fits
    for (const Offload offload : ranges.offloads) {
      // An offloaded optimizer costs time that nothing here saves.
      if (fitting < ranges.chunks.size() && OffloadsOptimizer(offload)) break;
      for (size_t i = 0; i < tried; ++i) {
        const Chunks& chunks = ranges.chunks[i];
        const Candidate smallest = make(chunks, ranges.stages.back(), offload);
        if (!Allowed(smallest.config)) continue;
        BURST_ASSIGN_OR_RETURN(FittedPlan least, plan(smallest));
        if (!consider(std::move(least))) continue;
        if (!OffloadsOptimizer(offload)) fitting = std::min(fitting, i);
        for (const int64_t stage : ranges.stages) {
          if (stage == ranges.stages.back()) continue;
          const Candidate candidate = make(chunks, stage, offload);
          if (!Allowed(candidate.config)) continue;
          BURST_ASSIGN_OR_RETURN(FittedPlan other, plan(candidate));
          consider(std::move(other));
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
  const Ranges ranges = RangesOf(setup.config, [](absl::string_view) { return true; });
  const auto plan_of = [&](const Candidate& candidate) {
    return PlanCandidate(setup, gpu, gpus_per_node, candidate);
  };
  BURST_ASSIGN_OR_RETURN(FittedPlan least, LeastMemory(setup.config, ranges, gpu, plan_of));
  if (!Fits(least.plan, gpu)) {
    const std::string at_least = least.options.empty() ? ""
                                                       : absl::StrCat("; with ", least.options, " ",
                                                                      Amounts(least.plan, gpu));
    return absl::ResourceExhaustedError(absl::StrCat(
        error, at_least, "; more GPUs, a shorter --seqlen or a smaller --batch need less"));
  }
  BURST_ASSIGN_OR_RETURN(std::optional<FittedPlan> fewest,
                         FewestChanges(setup.config, ranges, gpu, plan_of));
  if (fewest.has_value()) least = *std::move(fewest);
  return absl::ResourceExhaustedError(
      absl::StrCat(error, "; with ", least.options, " it needs ", Amounts(least.plan, gpu)));
}

}  // namespace burst
