// UlyssesAttention: each rank of a group receives the tokens of the whole group for a part of the
// heads. It computes their attention, and returns to every rank the results of its tokens.
//
// Source: DeepSpeed Ulysses (Jacobs et al., arXiv 2309.14509). With one group of all ranks, a
// kernel sees the whole sequence, and the all-to-alls are all that is sent. Smaller groups are the
// hybrid USP (Fang and Zhao, arXiv 2405.07719). Ranks with the same group_rank form a ring, over
// which BurstAttention runs. A group is neighboring ranks, where the links are fastest: rank =
// ring_rank * size + group_rank.
//
// Bytes that a rank sends to the other ranks of its group of U: (U-1)/U of
//
//   forward   q, k, v  B l s (D H + (D + E) K')   and back: out         B l s E H  (lse: B l H t)
//   backward  dout     B l s E H                  and back: dq, dk, dv  B l s (D H + (D + E) K')
//             dlse     B l H t
//
// Here are B sequences, l tokens of each on every rank, H heads and K KV heads, and K' = max(K, U).
// D is head_dim and E is value_dim, of elements of s bytes. An element of SumDType has t bytes.
// Fewer KV heads than ranks are replicated, and their gradients summed.
// The ring's bytes for H / U heads and U l tokens come on top.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/attention_call.h"
#include "burst/attention/attention_ranks.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/head_exchange.h"
#include "burst/tensor/tensor.h"

namespace burst {

// OK if a group of `size` ranks can divide the heads: size divides num_heads, and of size and
// num_kv_heads one divides the other. Else InvalidArgument that begins with the name of the size,
// and says which sizes can.
absl::Status CheckHeadsDivide(absl::string_view name, int64_t num_heads, int64_t num_kv_heads,
                              int size);

class UlyssesAttention : public SequenceParallelAttention {
 public:
  // Groups of `size` ranks of `comm`, which must outlive the object. Collective. `options` are for
  // the ring's attention, except ranks_per_node: it counts ranks of `comm`, and size divides it.
  // InvalidArgument for bad options or a size that does not divide the number of ranks.
  static absl::StatusOr<std::unique_ptr<UlyssesAttention>> Create(
      const BurstAttentionOptions& options, int size, Communicator* comm);
  // Creates one over ranks whose connections and buffers other attentions use, too.
  static absl::StatusOr<std::unique_ptr<UlyssesAttention>> CreateOver(
      const BurstAttentionOptions& options, int size, std::shared_ptr<AttentionRanks> ranks);

  absl::StatusOr<AttentionSchedule> Schedule(const Sequences& sequences,
                                             const Mask& mask) const override {
    return attention_->Schedule(sequences, mask);
  }

  // InvalidArgument also unless CheckHeadsDivide.
  absl::Status Check(const AttentionCall& call) const override;
  // The result keeps what was exchanged.
  absl::Status Forward(const AttentionCall& call, AttentionResult* result) override;
  // It needs the exchanged tensors of the result or, where they were dropped, `out` and `lse`.
  absl::Status Backward(const AttentionCall& call, const AttentionResult& result,
                        AttentionGradients* gradients) override;

  // The bytes that the all-to-alls sent; for the ring see ring().stats().
  struct Stats {
    ExchangeTraffic forward, backward;
  };
  const Stats& stats() const { return stats_; }
  ScoreOptions scores() const override { return attention_->scores(); }
  BytesSent bytes_sent() const override;  // both
  void ResetStats() override;

  const BurstAttention& ring() const { return *attention_; }

 private:
  UlyssesAttention() = default;
  // All heads of this rank's tokens -> this rank's heads of the group's tokens.
  absl::Status GatherHeads(const AttentionCall& call, AttentionResult::Exchanged* exchanged);
  // The ring's call for what was exchanged.
  AttentionCall RingCall(const AttentionCall& call,
                         const AttentionResult::Exchanged& exchanged) const;
  // The largest scores of this rank's heads -> of all heads.
  absl::Status GatherMaxLogits(const Tensor& own, const Tensor& all) const;
  Tensor OwnHeads(const Tensor& sinks) const;  // returns those of the heads that this rank computes

  std::shared_ptr<AttentionRanks> ranks_;
  Communicator* group_ = nullptr;  // the group of ranks_
  std::unique_ptr<HeadExchange> exchange_;
  std::unique_ptr<BurstAttention> attention_;  // over the ring
  Stats stats_;
};

}  // namespace burst
