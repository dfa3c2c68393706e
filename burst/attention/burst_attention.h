// BurstAttention: exact attention over a sequence spread over a ring of ranks.
//
// Sun et al., "BurstAttention: An Efficient Distributed Attention Framework for Extremely Long
// Sequences" (arXiv 2403.09347). Forward: Q stays, K and V travel; each round merges a local
// attention into (out, lse). Backward, by bytes: either K, V, dK, dV stay and Q, dO, lse, delta
// travel with dQ ("burst"), or Q, dO, dQ stay and K, V, dK, dV travel ("ring", Liu et al., arXiv
// 2310.01889). Transfers of the next round run while this one computes; fully masked rounds are
// skipped by every rank.
//
// Usable alone; see examples/attention.cc:
//
//   RunRanks(4, [](Communicator& comm) -> absl::Status {
//     BURST_ASSIGN_OR_RETURN(auto attention, BurstAttention::Create({}, &comm));
//     BURST_ASSIGN_OR_RETURN(RingSchedule schedule, attention->Schedule(seqlen));
//     // q, k, v: this rank's tokens, those at schedule.positions(comm.rank())
//     BURST_RETURN_IF_ERROR(attention->Forward(schedule, q, k, v, &out, &lse));
//     return attention->Backward(schedule, {q, k, v, out, lse, dout}, &dq, &dk, &dv);
//   });
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/ring/ring.h"
#include "burst/attention/ring/schedule.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/kernels/flash_attention.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

enum class BackwardDirection { kAuto, kBurst, kRing };  // kAuto: the one that sends fewer bytes

absl::StatusOr<BackwardDirection> ParseBackwardDirection(absl::string_view name);  // "auto", ...
const char* Name(BackwardDirection direction);

// What gradients are on their way. kFp32: as they are summed, in SumDType. kBf16, of bfloat16
// tensors only: half the bytes, rounded at every hop; ranks still add in float32.
enum class RingGradDType { kFp32, kBf16 };

absl::StatusOr<RingGradDType> ParseRingGradDType(absl::string_view name);  // "fp32", ...
const char* Name(RingGradDType travelling);

struct BurstAttentionOptions {
  Layout layout = Layout::kZigzag;
  AttentionMask mask;
  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  BackwardDirection backward = BackwardDirection::kAuto;
  RingGradDType ring_grad_dtype = RingGradDType::kFp32;
  // A double ring (route.h): ranks n L to (n + 1) L - 1 are on one node, with L of them a node,
  // and what leaves a node has a communicator of its own. 0: one flat ring. It divides the ranks.
  int ranks_per_node = 0;
  // The CPU kernels are always deterministic (bitwise equal from run to run); a device with a
  // faster order-free backward uses it only when this is false.
  bool deterministic = true;
  // What computes each round; it must outlive the object. Null: the kernels of the tensors' device.
  const AttentionKernels* kernels = nullptr;
};

class BurstAttention : public SequenceParallelAttention {
 public:
  // `comm` must outlive the object; null: a single rank. Collective. InvalidArgument for bad
  // options.
  static absl::StatusOr<std::unique_ptr<BurstAttention>> Create(
      const BurstAttentionOptions& options, Communicator* comm);
  ~BurstAttention() override;

  absl::StatusOr<RingSchedule> Schedule(int64_t seqlen,
                                        const DocumentStarts& documents = {}) const override;

  // Partial results and sums over rounds are of SumDType(dtype), and gradients that travel too
  // unless the options say otherwise (InvalidArgument where that is not for the dtype). `saved` is
  // what Forward was given and gave: it may as well be put together from those.
  absl::Status Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor* out, Tensor* lse, Saved* saved) override;
  absl::Status Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor* out, Tensor* lse) {
    return Forward(schedule, q, k, v, out, lse, /*saved=*/nullptr);
  }
  absl::Status Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq, Tensor* dk,
                        Tensor* dv) override;

  // The direction Backward takes: the given one, or the one in which all ranks together send fewer
  // bytes under this schedule.
  BackwardDirection Direction(const RingSchedule& schedule, int64_t num_heads, int64_t num_kv_heads,
                              int64_t head_dim, DType dtype) const;

  // Of the gradients on their way, of tensors of `dtype`.
  DType RingGradDTypeOf(DType dtype) const;

  const BurstAttentionOptions& options() const { return options_; }

  // What this rank sent and did since creation or ResetStats.
  struct Stats {
    RingTraffic forward, backward;
  };
  const Stats& stats() const { return stats_; }
  BytesSent bytes_sent() const override;
  void ResetStats() override { stats_ = Stats(); }

 private:
  BurstAttention(const BurstAttentionOptions& options, Communicator* comm,
                 std::unique_ptr<Communicator> between_nodes);

  absl::Status CheckInputs(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                           const Tensor& v) const;
  absl::Status CheckSaved(const Saved& saved) const;
  Ring::Tensors Travelling(Ring::Tensors tensors) const;
  const AttentionKernels& KernelsFor(const Tensor& q) const;

  const BurstAttentionOptions options_;
  Communicator* const comm_;
  const std::unique_ptr<Communicator> between_nodes_;  // null: one node
  std::unique_ptr<Ring> ring_;
  Stats stats_;
};

}  // namespace burst
