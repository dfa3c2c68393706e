// The collectives of tensor parallelism along a sequence: between the tokens that each rank of a
// group holds (TokenShard::local_positions) and those of the whole group. Knows tokens, nothing of
// attention.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

class TokenExchange {
 public:
  // `group` must outlive the object; the schedules are those of its ranks, members of one group.
  explicit TokenExchange(Communicator* group) : group_(group) {}

  // An exchange on its way, and the memory it uses.
  struct Pending {
    Tensor parts, result;
  };

  // own: [batch, held, ...], contiguous -> *all: [batch, length, ...] of the group's tokens in
  // order of position, contiguous and new. A rank sends `own` to every other one.
  absl::Status Gather(const TokenShard& shard, const Tensor& own, Tensor* all) const;

  // all: [batch, length, ...], contiguous -> *own: [batch, held, ...], summed over the ranks,
  // contiguous and new. A rank sends every other one its tokens.
  absl::Status ReduceScatter(const TokenShard& shard, const Tensor& all, Tensor* own) const;

  // The tokens of this rank out of those of its group: [batch, held, ...]. No communication.
  static Tensor Own(const TokenShard& shard, const Tensor& all);

  // Replaces `all`, contiguous, by its sum over the ranks.
  absl::Status AllReduce(const Tensor& all) const { return group_->AllReduceSum(all); }

  // The same in two steps, with other work in between where the communicator can do both at once.
  // What was posted may not be touched until Wait, which completes all of it. Then Gathered() is
  // the `all` of a Gather, and pending.result the `own` of a ReduceScatter.
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
