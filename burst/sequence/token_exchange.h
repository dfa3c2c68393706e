// The collectives of tensor parallelism along a sequence: between the local tokens of each
// rank of a group (TokenShard::local_positions) and the tokens of the whole group. Knows tokens,
// nothing of attention.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

class TokenExchange {
 public:
  // `group` must outlive the object. The shards given below are its ranks' shards.
  explicit TokenExchange(Communicator* group) : group_(group) {}

  // An exchange that was posted, and the memory it uses.
  struct Pending {
    Tensor parts, result;
  };

  // All-gather. own: [batch, local_length, ...], contiguous -> *all: [batch, group_length, ...] of
  // the group's tokens in order of position, contiguous and new.
  absl::Status Gather(const TokenShard& shard, const Tensor& own, Tensor* all) const;

  // Reduce-scatter. all: [batch, group_length, ...], contiguous -> *own: [batch, local_length,
  // ...], the sum over the ranks, contiguous and new.
  absl::Status ReduceScatter(const TokenShard& shard, const Tensor& all, Tensor* own) const;

  // The tokens of this rank out of those of its group: [batch, local_length, ...], new. Sends
  // nothing.
  static Tensor Own(const TokenShard& shard, const Tensor& all);

  // All-reduce: replaces `all`, contiguous, by its sum over the ranks.
  absl::Status AllReduce(const Tensor& all) const { return group_->AllReduceSum(all); }

  // Gather and ReduceScatter in two steps, with other work in between. Posted tensors may not be
  // touched until Wait, which completes everything that was posted. Then Gathered() is the `all` of
  // a Gather, and pending.result the `own` of a ReduceScatter.
  absl::Status PostGather(const TokenShard& shard, const Tensor& own, Pending* pending) const;
  static Tensor Gathered(const TokenShard& shard, const Pending& pending);
  absl::Status PostReduceScatter(const TokenShard& shard, const Tensor& all,
                                 Pending* pending) const;
  absl::Status PostAllReduce(const Tensor& all) const { return group_->PostAllReduceSum(all); }
  absl::Status Wait() const { return group_->Wait(Channel::kCollective); }

 private:
  Communicator* group_;
};

}  // namespace burst
