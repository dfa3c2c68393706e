// BurstAttention: exact attention over a sequence that is spread over a ring of ranks.
//
// Sun et al., "BurstAttention: An Efficient Distributed Attention Framework for Extremely Long
// Sequences" (arXiv 2403.09347); examples/ring_on_one_page.h is the same in plain loops.
//
// Forward: Q stays on its rank, K and V visit the others. Each round computes the attention to one
// block of keys and merges it into (out, lse). The backward has two directions, and takes the one
// that sends fewer bytes unless it is told:
//
//    burst  K, V, dK, dV stay; Q, dO, lse, delta visit the other ranks, and dQ follows them
//    ring   Q, dO, lse, delta, dQ stay; K, V visit the other ranks, and dK, dV follow them
//           (Liu et al., arXiv 2310.01889)
//
// The transfers of the next round run while this one computes. Rounds in which no query sees a key
// are skipped by every rank.
//
// Usable alone; see examples/attention.cc:
//
//   RunRanks(4, [](Communicator& comm) -> absl::Status {
//     BURST_ASSIGN_OR_RETURN(auto attention, BurstAttention::Create({}, &comm));
//     BURST_ASSIGN_OR_RETURN(AttentionSchedule schedule, attention->Schedule(seqlen,
//     Mask::Causal()));
//     // q, k, v: of this rank's tokens, schedule.shard().local_positions()
//     const AttentionCall call = {&schedule, q, k, v};
//     AttentionResult result;
//     BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
//     AttentionGradients gradients = {dout};  // the gradient of result.out; Backward makes dq, dk
//     and dv return attention->Backward(call, result, &gradients);
//   });
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/attention_call.h"
#include "burst/attention/attention_ranks.h"
#include "burst/attention/kernel_mask.h"
#include "burst/attention/ring/call_plan.h"
#include "burst/attention/ring/ring.h"
#include "burst/attention/ring/schedule.h"
#include "burst/attention/score_options.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/kernels/flash_attention.h"
#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

struct SideOfStep;

enum class BackwardDirection { kAuto, kBurst, kRing };  // kAuto: see Direction

absl::StatusOr<BackwardDirection> ParseBackwardDirection(absl::string_view name);  // "auto", ...
const char* Name(BackwardDirection direction);

// The dtype in which gradients are sent around the ring. With kFp32 it is the dtype in which ranks
// accumulate them, SumDType(dtype of q). With kBf16, for bfloat16 tensors only, gradients have half
// the bytes and are rounded at every transfer. Ranks still accumulate in float32.
enum class RingGradDType { kFp32, kBf16 };

absl::StatusOr<RingGradDType> ParseRingGradDType(absl::string_view name);  // "fp32", ...
const char* Name(RingGradDType dtype);

struct BurstAttentionOptions {
  Layout layout = Layout::kZigzag;
  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  ScoreOptions scores;
  BackwardDirection backward = BackwardDirection::kAuto;
  RingGradDType ring_grad_dtype = RingGradDType::kFp32;
  // L > 0: a double ring (route.h) of nodes of L neighboring ranks; L divides the number of ranks.
  // Messages between nodes have a communicator of their own. 0: a flat ring.
  int ranks_per_node = 0;
  // Bitwise the same gradients in every run. The CPU kernels always are; GPUs have a faster
  // backward without it.
  bool deterministic = true;
  // The forward computes matrix products in 8 bits (FlashForwardParams::fp8); the backward does not
  // change.
  bool fp8_forward = false;
  // The kernels that compute each round; they must outlive the object. Null: the kernels of the
  // tensors' device.
  const AttentionKernels* kernels = nullptr;
};

class BurstAttention : public SequenceParallelAttention {
 public:
  // `comm` must outlive the object; null: a single rank. Collective. InvalidArgument for bad
  // options. `group`: ranks that divide the tokens of one rank of the ring among themselves outside
  // of attention (Ulysses, tensor parallelism). Their schedules say who has which; q, k and v are
  // of all tokens of the group.
  static absl::StatusOr<std::unique_ptr<BurstAttention>> Create(
      const BurstAttentionOptions& options, Communicator* comm, const RankGroup& group = {});
  // Creates one over ranks whose connections and buffers other attentions use, too.
  static absl::StatusOr<std::unique_ptr<BurstAttention>> CreateOver(
      const BurstAttentionOptions& options, std::shared_ptr<AttentionRanks> ranks,
      const RankGroup& group = {});
  ~BurstAttention() override;

  absl::StatusOr<AttentionSchedule> Schedule(const Sequences& sequences,
                                             const Mask& mask) const override;

  // Results are accumulated over rounds in SumDType(dtype); lse is contiguous. InvalidArgument also
  // for a ring_grad_dtype that is not for the dtype of q.
  absl::Status Forward(const AttentionCall& call, AttentionResult* result) override;
  absl::Status Backward(const AttentionCall& call, const AttentionResult& result,
                        AttentionGradients* gradients) override;

  absl::Status Check(const AttentionCall& call) const override;
  // The part of Check that does not depend on the schedule: whether the tensors fit together and
  // the kernels serve them with these options.
  absl::Status CheckTensors(const AttentionCall& call) const;

  ScoreOptions scores() const override { return options_.scores; }

  // The direction that Backward takes: the one of the options, or the one whose busiest rank has
  // less work. If these are nearly equal, it is the one in which all ranks together send fewer
  // bytes.
  BackwardDirection Direction(const RingSchedule& schedule, int64_t num_heads, int64_t num_kv_heads,
                              const HeadWidths& widths, DType dtype) const;

  // The dtype in which the gradients of tensors of `dtype` are sent.
  DType RingGradDTypeOf(DType dtype) const;

  const BurstAttentionOptions& options() const { return options_; }
  // The kernels for tensors like q.
  const AttentionKernels& KernelsFor(const Tensor& q) const;

  // Returns what this rank sent and computed since creation or ResetStats.
  struct Stats {
    RingTraffic forward, backward;
  };
  const Stats& stats() const { return stats_; }
  BytesSent bytes_sent() const override;
  void ResetStats() override { stats_ = Stats(); }

 private:
  BurstAttention(const BurstAttentionOptions& options, std::shared_ptr<AttentionRanks> ranks,
                 Ring* ring, const RankGroup& group);

  absl::StatusOr<TokenShard> Shard(Layout layout, int64_t seqlen) const;
  absl::StatusOr<TokenShard> Shard(const std::vector<std::vector<int32_t>>& positions) const;
  absl::StatusOr<TokenShard> QueryShard(const Sequences& sequences, const Mask& mask) const;
  Tensor DeltaAndSinkGradients(const AttentionCall& call, const AttentionResult& result,
                               AttentionGradients* gradients) const;
  // What all calls of a Forward have in common. largest: null, or of every head.
  FlashForwardParams ForwardParams(const AttentionCall& call, const Tensor& lse,
                                   const Tensor& largest) const;
  // Returns the changes of scores in one call of the kernels: for queries and keys of these ranks'
  // blocks, and heads from `first_head` on.
  ScoreChanges ScoresOf(const AttentionCall& call, int queries, int keys, int64_t first_head) const;
  // The calls of the kernels in one step of the ring.
  void BackwardOfStep(const AttentionCall& call, const PlannedStep& step, const KernelMask& mask,
                      const SideOfStep& queries, const SideOfStep& keys) const;
  // Whether masks that are sparse in blocks are given to the kernels as such.
  bool TakesBlocks(const AttentionCall& call) const;

  const BurstAttentionOptions options_;
  const std::shared_ptr<AttentionRanks> ranks_;
  Communicator* const comm_;  // ranks_' communicator
  Ring* const ring_;          // ranks_' ring
  const RankGroup group_;
  KernelArray<float> slopes_;  // ALiBi's slopes
  Stats stats_;
};

}  // namespace burst
