// Runs BurstAttention over ranks that are threads, joins their results and counts what they sent.
#pragma once

#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "tests/attention/sequence_problem.h"

namespace burst {

inline constexpr BackwardDirection kDirections[] = {BackwardDirection::kBurst,
                                                    BackwardDirection::kRing};

// Runs one rank, which writes its part of the results.
inline absl::Status RunRank(Communicator& comm, const BurstAttentionOptions& options,
                            const Inputs& inputs, const IntervalMask& mask,
                            const AttentionResults& results,
                            BurstAttention::Stats* stats = nullptr) {
  BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
  BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                         attention->Schedule(inputs.q.dim(1), MaskOf(mask)));
  BURST_RETURN_IF_ERROR(AttendOnRank(*attention, schedule, inputs, results));
  if (stats != nullptr) *stats = attention->stats();
  return absl::OkStatus();
}

// Runs the ring over `world_size` ranks and joins the parts of the results. Traffic is summed over
// ranks.
inline absl::Status RunRing(int world_size, const BurstAttentionOptions& options,
                            const Inputs& inputs, const IntervalMask& mask,
                            AttentionResults* results, RingTraffic* forward = nullptr,
                            RingTraffic* backward = nullptr) {
  *results = EmptyResults(inputs);
  std::vector<BurstAttention::Stats> stats(world_size);
  BURST_RETURN_IF_ERROR(RunTestRanks(world_size, [&](Communicator& comm) {
    return RunRank(comm, options, inputs, mask, *results, &stats[comm.rank()]);
  }));
  const auto add = [](const RingTraffic& from, RingTraffic* to) {
    if (to == nullptr) return;
    for (Link link : kLinks) {
      to->blocks[link] = to->blocks[link] + from.blocks[link];
      to->gradients[link] = to->gradients[link] + from.gradients[link];
    }
    to->rounds_computed += from.rounds_computed;
    to->rounds_skipped += from.rounds_skipped;
  };
  for (const BurstAttention::Stats& rank : stats) {
    add(rank.forward, forward);
    add(rank.backward, backward);
  }
  return absl::OkStatus();
}

}  // namespace burst
