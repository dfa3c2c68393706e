#include "burst/attention/tensor_parallel_attention.h"

#include <utility>

#include "burst/base/status.h"

namespace burst {

absl::StatusOr<std::unique_ptr<TensorParallelAttention>> TensorParallelAttention::Create(
    const BurstAttentionOptions& options, const Communicator& group) {
  std::unique_ptr<TensorParallelAttention> attention(
      new TensorParallelAttention(options, {group.world_size(), group.rank()}));
  BURST_ASSIGN_OR_RETURN(attention->attention_, BurstAttention::Create(options, nullptr));
  return attention;
}

absl::StatusOr<RingSchedule> TensorParallelAttention::Schedule(
    int64_t seqlen, const DocumentStarts& documents) const {
  BURST_ASSIGN_OR_RETURN(TokenShard shard, TokenShard::Create(/*rank=*/0, /*world_size=*/1,
                                                              options_.layout, seqlen, group_));
  return RingSchedule::Create(std::move(shard), options_.mask, documents);
}

}  // namespace burst
