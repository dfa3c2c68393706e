// BurstAttention: exact attention over a sequence spread over a ring of ranks.
//
// Sun et al., "BurstAttention: An Efficient Distributed Attention Framework for Extremely Long
// Sequences" (arXiv 2403.09347). Forward: Q stays, K and V travel; each round merges a local
// attention into (out, lse). Backward, by bytes: either K, V, dK, dV stay and Q, dO, lse, delta
// travel with dQ ("burst"), or Q, dO, dQ stay and K, V, dK, dV travel ("ring", Liu et al., arXiv
// 2310.01889). Transfers of the next round run while this one computes; fully masked rounds are
// skipped by every rank.
//
// Usable alone; see burst/attention/example.cc:
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
#include "burst/attention/layout.h"
#include "burst/attention/ring.h"
#include "burst/attention/schedule.h"
#include "burst/autograd/tape.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {

enum class BackwardDirection { kAuto, kBurst, kRing };  // kAuto: the one that sends fewer bytes

absl::StatusOr<BackwardDirection> ParseBackwardDirection(absl::string_view name);  // "auto", ...
const char* Name(BackwardDirection direction);

struct BurstAttentionOptions {
  Layout layout = Layout::kZigzag;
  AttentionMask mask;
  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim)
  BackwardDirection backward = BackwardDirection::kAuto;
  // The CPU kernels are always deterministic (bitwise equal from run to run); a device with a
  // faster order-free backward uses it only when this is false.
  bool deterministic = true;
};

class BurstAttention {
 public:
  // `comm` must outlive the object; null: a single rank. InvalidArgument for bad options.
  static absl::StatusOr<std::unique_ptr<BurstAttention>> Create(
      const BurstAttentionOptions& options, Communicator* comm);
  ~BurstAttention();

  // The schedule for sequences of `seqlen` tokens in all (any number, also fewer than ranks). Build
  // it once and use it for every layer and step, or once per batch of packed documents.
  absl::StatusOr<RingSchedule> Schedule(int64_t seqlen, const DocumentStarts& documents = {}) const;

  // q: [batch, length, num_heads, head_dim], k, v: [batch, length, num_kv_heads, head_dim] of this
  // rank's `length` tokens, in order of position; innermost stride 1; float32, float64 or, on a
  // GPU, bfloat16 (InvalidArgument for what no kernel serves). num_kv_heads divides num_heads.
  // out: like q, may be strided too; lse: [batch, num_heads, length], natural log of the softmax's
  // denominator, -inf for a query that sees no key, of SumDType(dtype). Both are allocated when
  // null. Partial results, gradients that travel and sums over rounds are of SumDType(dtype).
  absl::Status Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor* out, Tensor* lse);

  // What Forward was given and gave, and the gradients of its outputs; dlse null: zero.
  struct Saved {
    Tensor q, k, v, out, lse, dout, dlse;
  };
  // Assigns dq, dk, dv (like q, k, v; allocated when null; may be strided: slices of one tensor).
  absl::Status Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq, Tensor* dk,
                        Tensor* dv);

  // The direction Backward takes: the given one, or the one in which all ranks together send fewer
  // bytes under this schedule.
  BackwardDirection Direction(const RingSchedule& schedule, int64_t num_heads, int64_t num_kv_heads,
                              int64_t head_dim, DType dtype) const;

  const BurstAttentionOptions& options() const { return options_; }

  // What this rank sent and did since creation or ResetStats.
  struct Stats {
    RingTraffic forward, backward;
  };
  const Stats& stats() const { return stats_; }
  void ResetStats() { stats_ = Stats(); }

 private:
  BurstAttention(const BurstAttentionOptions& options, Communicator* comm);

  absl::Status CheckInputs(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                           const Tensor& v) const;
  absl::Status CheckSaved(const Saved& saved) const;
  Tensor Travelling(const Tensor& tensor) const;

  const BurstAttentionOptions options_;
  Communicator* const comm_;
  std::unique_ptr<Ring> ring_;
  Stats stats_;
};

// The op on the tape; out: like q. `schedule` is kept until the backward. A failed transfer is
// reported through tape.status(). With `lse`, the log-sum-exp is returned too, and differentiable.
Variable BurstAttentionOp(Tape& tape, BurstAttention& attention,
                          std::shared_ptr<const RingSchedule> schedule, const Variable& q,
                          const Variable& k, const Variable& v, Variable* lse = nullptr);

// The same on the packed output of one projection, qkv [batch, length, num_heads + 2 num_kv_heads,
// head_dim]: the query heads, then the keys', then the values'. Nothing is split or joined: the
// kernels read and write slices. out: [batch, length, num_heads, head_dim].
Variable BurstAttentionOp(Tape& tape, BurstAttention& attention,
                          std::shared_ptr<const RingSchedule> schedule, const Variable& qkv,
                          int64_t num_heads, int64_t num_kv_heads);

}  // namespace burst
