// The ways to spread attention over ranks, by name.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/attention_ranks.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"

namespace burst {

enum class Strategy {
  kSingle,        // one rank has the whole sequence
  kBurst,         // a ring; the direction of its backward is an option
  kRing,          // RingAttention: a ring in which K, V, dK and dV are sent
  kUlysses,       // an all-to-all of heads for tokens among all ranks
  kBurstUlysses,  // such all-to-alls within groups, and a ring of groups
};

absl::StatusOr<Strategy> ParseStrategy(absl::string_view name);  // "single", "burst", ...
const char* Name(Strategy strategy);

// Whether the strategy's backward can take either direction: options.backward has a meaning.
inline bool HasDirections(Strategy strategy) {
  return strategy == Strategy::kBurst || strategy == Strategy::kBurstUlysses;
}

// Whether the strategy has a ring: options.ranks_per_node has a meaning.
inline bool HasRing(Strategy strategy) {
  return strategy == Strategy::kRing || HasDirections(strategy);
}

// The attention of this rank of `comm`, which must outlive it; null: a single rank. Collective.
// `group_size`: ranks that divide the heads, for kBurstUlysses; other strategies ignore it.
//
// `tensor`: with kSingle, kBurst and kRing, this rank's place in a group of tensor parallelism
// (model/tensor_parallel.h); every rank of `comm` is one such group. It shares that group's tokens,
// and attention takes its heads of all of them, schedule.shard().group_length() tokens. Outside of
// the layers a rank has its local_positions() only.
//
// InvalidArgument for bad options, and if a group size does not divide the number of ranks. kSingle
// must have one rank. A strategy must have the backward's direction, a ring for ranks_per_node, and
// serve a group of tensor parallelism if there is one.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttention(
    Strategy strategy, const BurstAttentionOptions& options, int group_size, Communicator* comm,
    const RankGroup& tensor = {});
// Creates one over ranks whose connections and buffers other attentions use, too.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttentionOver(
    Strategy strategy, const BurstAttentionOptions& options, int group_size,
    std::shared_ptr<AttentionRanks> ranks, const RankGroup& tensor = {});

}  // namespace burst
