// The ways to spread attention over ranks, by name.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"

namespace burst {

enum class Strategy {
  kSingle,        // one rank holds the sequence
  kBurst,         // a ring; its backward's direction is an option
  kRing,          // RingAttention: a ring in which keys, values and their gradients travel
  kUlysses,       // an all-to-all over heads among all ranks
  kBurstUlysses,  // all-to-alls in groups, a ring of groups
};

absl::StatusOr<Strategy> ParseStrategy(absl::string_view name);  // "single", "burst", ...
const char* Name(Strategy strategy);

// Whether options.backward says something: the strategy's backward has two directions to take.
inline bool HasDirections(Strategy strategy) {
  return strategy == Strategy::kBurst || strategy == Strategy::kBurstUlysses;
}

// Whether options.ranks_per_node says something: the strategy has a ring.
inline bool HasRing(Strategy strategy) {
  return strategy == Strategy::kRing || HasDirections(strategy);
}

// The attention of this rank of `comm`, which must outlive it. Collective. `group_size`: ranks that
// share heads, for kBurstUlysses; no other strategy reads it. InvalidArgument for bad options, a
// group size that does not divide the ranks, several ranks with kSingle, a backward's direction
// that is not the strategy's, and nodes where there is no ring.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttention(
    Strategy strategy, const BurstAttentionOptions& options, int group_size, Communicator* comm);

}  // namespace burst
