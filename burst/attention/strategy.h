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
  kTp,    // tensor parallel: heads and hidden channels are spread, every rank has all tokens
  kTpSp,  // the same, with the tokens spread wherever the layers allow it
};

absl::StatusOr<Strategy> ParseStrategy(absl::string_view name);  // "single", "burst", ...
const char* Name(Strategy strategy);

// Whether options.backward has a meaning: the strategy's backward can take either direction.
inline bool HasDirections(Strategy strategy) {
  return strategy == Strategy::kBurst || strategy == Strategy::kBurstUlysses;
}

// Whether options.ranks_per_node has a meaning: the strategy has a ring.
inline bool HasRing(Strategy strategy) {
  return strategy == Strategy::kRing || HasDirections(strategy);
}

// Whether the ranks of a sequence share the model's parameters and heads. The model takes care of
// that (model/tensor_parallel.h); attention is given the rank's heads on all tokens.
inline bool IsTensorParallel(Strategy strategy) {
  return strategy == Strategy::kTp || strategy == Strategy::kTpSp;
}

// The attention of this rank of `comm`, which must outlive it; null: of one rank. Collective.
// `group_size`: ranks that share heads, for kBurstUlysses; no other strategy reads it.
// InvalidArgument for bad options, a group size that does not divide the ranks, several ranks with
// kSingle, a backward's direction that is not the strategy's, and nodes where there is no ring.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttention(
    Strategy strategy, const BurstAttentionOptions& options, int group_size, Communicator* comm);

}  // namespace burst
