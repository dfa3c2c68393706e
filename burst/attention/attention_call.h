// What one call of attention takes and gives, and what its backward takes and gives: a schedule and
// tensors. Callers hold these values; an attention remembers nothing from one call to the next.
#pragma once

#include <cstdint>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "burst/attention/exact_schedule.h"
#include "burst/attention/ring/schedule.h"
#include "burst/attention/score_options.h"
#include "burst/base/check.h"
#include "burst/kernels/flash_attention.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

// What a schedule says whatever the strategy, and the schedule of the strategy.
class AttentionSchedule {
 public:
  explicit AttentionSchedule(RingSchedule ring) : form_(std::move(ring)) {}
  explicit AttentionSchedule(ExactSchedule exact) : form_(std::move(exact)) {}

  // The tokens of each rank of a ring. A rank of the ring may be a group of ranks (Ulysses).
  const TokenShard& shard() const {  // the queries
    return ring() != nullptr ? ring()->shard() : exact()->shard();
  }
  const TokenShard& key_shard() const { return ring() != nullptr ? ring()->key_shard() : shard(); }
  // Whether the keys are of another sequence than the queries.
  bool is_cross() const { return ring() != nullptr && ring()->is_cross(); }
  // Batch rows that the mask describes; 1: the same mask for all.
  int64_t rows() const { return ring() != nullptr ? ring()->rows() : exact()->rows(); }

  // RingSchedule::Prefix, of a ring's schedule.
  AttentionSchedule Prefix(int64_t tokens) const {
    BURST_CHECK(ring() != nullptr);
    return AttentionSchedule(ring()->Prefix(tokens));
  }

  // Null: another attention's.
  const RingSchedule* ring() const { return std::get_if<RingSchedule>(&form_); }
  const ExactSchedule* exact() const { return std::get_if<ExactSchedule>(&form_); }

 private:
  std::variant<RingSchedule, ExactSchedule> form_;
};

// B sequences; a rank has the tokens schedule->shard().local_positions() of each, in order of
// position.
struct AttentionCall {
  const AttentionSchedule* schedule = nullptr;  // must outlive the call and its backward
  // [B, length, num_heads, head_dim], innermost stride 1. The dtype is float32, float64, bfloat16
  // or float16.
  Tensor q;
  // [B, length, num_kv_heads, head_dim]; num_kv_heads divides num_heads. In cross-attention k and v
  // have the tokens of schedule->key_shard().
  Tensor k;
  // [B, length of k, num_kv_heads, value_dim]. Some kernels serve only a value_dim of head_dim.
  Tensor v;
  // The attention sinks (FlashForwardParams::sinks), one for each head of q: [num_heads] of
  // SumDType(dtype of q), on its device; null: none.
  Tensor sinks = {};
  // The weights that are dropped, if the attention drops any. It is equal on all ranks of a
  // sequence, with another seed for every layer and micro-batch.
  WeightDropout dropout = {};
  bool wants_lse = true;  // false: an exchange between ranks may leave lse out of the result
  bool wants_max_logits = false;

  HeadWidths widths() const { return {q.dim(3), v.dim(3)}; }
  Shape OutShape() const { return {q.dim(0), q.dim(1), q.dim(2), v.dim(3)}; }

  // InvalidArgument unless the tensors fit together and these kernels serve them.
  absl::Status Check(const AttentionKernels& kernels) const;
  // InvalidArgument unless q and k have this many tokens, and the batch the rows of the mask.
  absl::Status CheckLengths(int64_t q_length, int64_t k_length) const;
};

struct AttentionResult {
  // AttentionCall::OutShape() of q's dtype, may be strided too; Forward allocates it when null.
  Tensor out = {};
  // [B, num_heads, length] of SumDType(dtype): the natural log of the softmax's denominator, -inf
  // for a query that sees no key; contiguous. Forward allocates it when null.
  Tensor lse = {};
  // [B, num_heads] float32 on the CPU, if the call wants them; Forward allocates them when null.
  // They are each head's largest score over the queries and keys of all ranks, after softcap and
  // ALiBi. They are -inf where no query sees a key. All ranks get the same values. Optimizers clip
  // these scores (Kimi K2, arXiv 2507.20534).
  Tensor max_logits = {};

  // With UlyssesAttention, the exchanged tensors: this rank's heads of the tokens of its group.
  // Backward exchanges them again where they are null. Callers may drop them to save memory.
  struct Exchanged {
    Tensor q, k, v, out, lse;
  };
  Exchanged exchanged = {};

  // InvalidArgument unless out and lse fit a call.
  absl::Status Check(const AttentionCall& call) const;
  // Allocates what Forward writes, or checks it.
  absl::Status Prepare(const AttentionCall& call, bool with_lse = true);
};

struct AttentionGradients {
  // The caller adds the gradients of the result: dout, like out, and dlse, like lse (null: zero).
  Tensor dout, dlse = {};
  // The gradients of q, k and v, which Backward allocates when null. They may be strided, such as
  // slices of one tensor.
  Tensor dq = {}, dk = {}, dv = {};
  // With sinks, Backward makes this [parts, num_heads]. Its sum over parts and ranks is the
  // gradient of the sinks. There is one part; ExactAttention has one for each of its calls.
  Tensor dsinks = {};

  // Checks what the caller added; allocates dq, dk and dv, or checks them.
  absl::Status Prepare(const AttentionCall& call);
};

inline constexpr int kSeqAxis = 1, kHeadAxis = 2;        // axes of [batch, seqlen, heads, columns]
inline constexpr int kLseSeqAxis = 2, kLseHeadAxis = 1;  // axes of [batch, heads, seqlen]

inline Shape LseShape(const Tensor& q) { return {q.dim(0), q.dim(2), q.dim(1)}; }

// Returns the shape of a kernels' call with q, k and v, without a mask. softmax_scale 0:
// 1 / sqrt(head_dim).
FlashAttentionShape KernelShape(double softmax_scale, const Tensor& q, const Tensor& k,
                                const Tensor& v);

}  // namespace burst
