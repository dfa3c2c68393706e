#include "train/plan/fit.h"

#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "train/config/conflicts.h"

namespace burst {
namespace {

constexpr int64_t kFfnChunk = 16384;  // tokens: long enough for GEMMs at their full rate

constexpr int kOptions = 7;  // options that may be changed

// Time for the search for the fewest changes. After it, the search returns what is known to fit.
constexpr std::chrono::seconds kMostSearch{30};

struct Candidate {
  ResolvedConfig config;
  std::string options;
  int changes = 0;
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
Ranges RangesOf(const ResolvedConfig& given, const Choices& choices) {
  Ranges ranges{{{given.recompute, given.recompute_segment}},
                {{given.ffn_chunk, given.head_chunk}},
                {given.zero},
                {given.offload}};
  ResolvedConfig fixed = given;  // the options without those that may be chosen
  if (choices.offload) fixed.offload = Offload::kNone;
  if (choices.recompute) SetRecomputation({Recompute::kFull}, &fixed);
  if (choices.recompute) {
    ranges.recomputes = {
        {Recompute::kNone}, {Recompute::kSelective}, {Recompute::kSequence}, {Recompute::kFull}};
    for (int64_t segment = 2; 2 * segment <= given.model.layers && segment <= 8; segment *= 2) {
      ranges.recomputes.push_back({Recompute::kFull, segment});
    }
    ranges.recomputes = AllowedOf(fixed, ranges.recomputes, SetRecomputation);
  }
  const int64_t local_tokens = given.batch / given.mesh.data * given.seqlen / given.mesh.sequence;
  if (choices.ffn_chunk && given.ffn_chunk == 0 && local_tokens > kFfnChunk) {
    ranges.chunks.push_back({kFfnChunk, given.head_chunk});
    ranges.chunks = AllowedOf(fixed, ranges.chunks, SetChunks);
  }
  const int64_t fewest = FewestKvHeads(given);
  if (choices.head_chunk && given.head_chunk == 0 && fewest < given.model.WithDefaults().kv_heads) {
    ranges.chunks.push_back({ranges.chunks.back().ffn, fewest});
    ranges.chunks = AllowedOf(fixed, ranges.chunks, SetChunks);
  }
  if (choices.zero) {
    ranges.stages = AllowedOf(fixed, std::vector<int64_t>{0, 1, 2, 3},
                              [](int64_t stage, ResolvedConfig* c) { c->zero = stage; });
  }
  if (choices.offload) {
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
  const auto add = [&](bool changed, const std::string& option) {
    if (!changed) return;
    absl::StrAppend(&candidate.options, candidate.options.empty() ? "" : " ", option);
    ++candidate.changes;
  };
  add(recompute.kind != given.recompute, absl::StrCat("--recompute=", Name(recompute.kind)));
  add(recompute.segment != given.recompute_segment,
      absl::StrCat("--recompute_segment=", recompute.segment));
  add(chunks.ffn != given.ffn_chunk, absl::StrCat("--ffn_chunk=", chunks.ffn));
  add(chunks.heads != given.head_chunk, absl::StrCat("--head_chunk=", chunks.heads));
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

// More recomputation takes more time with any other options, except for an offloaded optimizer. So
// the search ends with the first kind of recomputation whose step fits without one. The largest
// stage needs least memory.
absl::StatusOr<FittedPlan> FitStep(const TrainingSetup& setup, const GpuModel& gpu,
                                   int gpus_per_node, const Choices& choices) {
  const Ranges ranges = RangesOf(setup.config, choices);
  std::optional<FittedPlan> best;  // or the smallest one, while none fits
  const auto consider = [&](FittedPlan other) {
    const bool fits = Fits(other.plan, gpu);
    if (!best.has_value() || IsBetter(other.plan, best->plan, gpu)) best = std::move(other);
    return fits;
  };
  for (const Recomputation& recompute : ranges.recomputes) {
    const auto make = [&](const Chunks& chunks, int64_t stage, Offload offload) {
      return MakeCandidate(setup.config, recompute, chunks, stage, offload);
    };
    const auto plan = [&](const Candidate& candidate) {
      return PlanCandidate(setup, gpu, gpus_per_node, candidate);
    };
    bool found = false;
    for (const Offload offload : ranges.offloads) {
      if (found && OffloadsOptimizer(offload)) break;  // it costs time that nothing here saves
      for (const Chunks& chunks : ranges.chunks) {
        const Candidate smallest = make(chunks, ranges.stages.back(), offload);
        if (!Allowed(smallest.config)) continue;
        BURST_ASSIGN_OR_RETURN(FittedPlan least, plan(smallest));
        if (!consider(std::move(least))) continue;
        found |= !OffloadsOptimizer(offload);
        for (const int64_t stage : ranges.stages) {
          if (stage == ranges.stages.back()) continue;
          const Candidate candidate = make(chunks, stage, offload);
          if (!Allowed(candidate.config)) continue;
          BURST_ASSIGN_OR_RETURN(FittedPlan other, plan(candidate));
          consider(std::move(other));
        }
      }
    }
    if (found) break;
  }
  return *std::move(best);
}

absl::Status CheckFits(const TrainingSetup& setup, const StepPlan& plan, const GpuModel& gpu,
                       int gpus_per_node) {
  if (Fits(plan, gpu)) return absl::OkStatus();
  const std::string error = absl::StrCat("a step needs ", Needs(plan, gpu));
  const Ranges ranges = RangesOf(setup.config, {true, true, true, true, true});
  std::optional<FittedPlan> least;
  for (const Recomputation& recompute : ranges.recomputes) {
    if (recompute.kind != ranges.recomputes.back().kind) continue;
    for (const Offload offload : ranges.offloads) {
      for (const Chunks& chunks : ranges.chunks) {
        const bool enough = least.has_value() && Fits(least->plan, gpu);
        if (enough || (recompute.segment > 1 && !(chunks == ranges.chunks.back()))) continue;
        const Candidate candidate =
            MakeCandidate(setup.config, recompute, chunks, ranges.stages.back(), offload);
        if (!Allowed(candidate.config)) continue;
        BURST_ASSIGN_OR_RETURN(FittedPlan other,
                               PlanCandidate(setup, gpu, gpus_per_node, candidate));
        if (!least.has_value() || IsBetter(other.plan, least->plan, gpu)) least = std::move(other);
      }
    }
  }
  if (!Fits(least->plan, gpu)) {
    const std::string at_least =
        least->options.empty()
            ? ""
            : absl::StrCat("; with ", least->options, " ", Amounts(least->plan, gpu));
    return absl::ResourceExhaustedError(absl::StrCat(
        error, at_least, "; more GPUs, a shorter --seqlen or a smaller --batch need less"));
  }
  const auto deadline = std::chrono::steady_clock::now() + kMostSearch;
  const auto in_time = [&] { return std::chrono::steady_clock::now() < deadline; };
  for (int changes = 1; changes <= kOptions && in_time(); ++changes) {
    std::optional<FittedPlan> best;
    for (const Recomputation& recompute : ranges.recomputes) {
      for (const Chunks& chunks : ranges.chunks) {
        for (const int64_t stage : ranges.stages) {
          for (const Offload offload : ranges.offloads) {
            const Candidate candidate =
                MakeCandidate(setup.config, recompute, chunks, stage, offload);
            const bool counts = candidate.changes == changes && Allowed(candidate.config);
            if (!counts || !in_time()) continue;
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
      least = std::move(best);
      break;
    }
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(error, "; with ", least->options, " it needs ", Amounts(least->plan, gpu)));
}

}  // namespace burst
