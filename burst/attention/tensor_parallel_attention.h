// TensorParallelAttention: the attention of Megatron's tensor parallelism. Each rank of a group has
// a part of the heads, on all tokens; attention itself sends nothing.
//
// The group communicates around it, where matrix products make the heads and bring them together
// (model/tensor_parallel.h). Outside of the layers a rank still has its own part of the tokens, so
// its schedule is that of a group: local_positions() is the rank's part, while Forward and Backward
// take the tokens of the whole sequence, schedule.shard().length() of them.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/ring/schedule.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"

namespace burst {

class TensorParallelAttention : public SequenceParallelAttention {
 public:
  // For this rank of `group`. InvalidArgument for bad options; the direction of the backward
  // is ignored.
  static absl::StatusOr<std::unique_ptr<TensorParallelAttention>> Create(
      const BurstAttentionOptions& options, const Communicator& group);

  absl::StatusOr<RingSchedule> Schedule(int64_t seqlen,
                                        const DocumentStarts& documents = {}) const override;

  // q: [batch, schedule.shard().length(), this rank's heads, head_dim], k and v likewise.
  absl::Status Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor* out, Tensor* lse, Saved* saved) override {
    return attention_->Forward(schedule, q, k, v, out, lse, saved);
  }
  absl::Status Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq, Tensor* dk,
                        Tensor* dv) override {
    return attention_->Backward(schedule, saved, dq, dk, dv);
  }

  BytesSent bytes_sent() const override { return {}; }
  void ResetStats() override {}

 private:
  TensorParallelAttention(const BurstAttentionOptions& options, const RankGroup& group)
      : options_(options), group_(group) {}

  const BurstAttentionOptions options_;
  const RankGroup group_;
  std::unique_ptr<BurstAttention> attention_;  // of one rank
};

}  // namespace burst
