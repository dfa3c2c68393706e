// SequenceParallelAttention: exact attention over a sequence whose tokens are spread over ranks.
// The messages between the ranks depend on the strategy: BurstAttention sends blocks around a ring
// (burst_attention.h), UlyssesAttention exchanges tokens for heads (ulysses_attention.h).
// CreateAttention (strategy.h) makes one by name. A model only calls AttentionOp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/attention_schedule.h"
#include "burst/attention/score_options.h"
#include "burst/autograd/tape.h"
#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

// The sequences that attention is computed for, and how the ranks have their tokens.
struct Sequences {
  // One sequence of `seqlen` tokens (any number, also fewer than ranks) in the attention's layout.
  Sequences(int64_t seqlen) : seqlen(seqlen) {}  // NOLINT: a length says it all
  // One sequence that no layout describes: the global positions of every rank's tokens
  // (TokenShard::Create).
  Sequences(std::vector<std::vector<int32_t>> positions)  // NOLINT: likewise
      : positions(std::move(positions)) {}
  // Cross-attention: q is of one sequence, of `q_seqlen` tokens in the attention's layout, k and v
  // of another, of `k_seqlen` tokens in `k_layout` (null: the same layout).
  static Sequences Cross(int64_t q_seqlen, int64_t k_seqlen,
                         std::optional<Layout> k_layout = std::nullopt) {
    Sequences sequences(q_seqlen);
    sequences.keys = Keys{k_seqlen, k_layout};
    return sequences;
  }

  struct Keys {
    int64_t seqlen = 0;
    std::optional<Layout> layout;
  };

  int64_t seqlen = 0;
  std::optional<std::vector<std::vector<int32_t>>> positions;  // in place of seqlen
  std::optional<Keys> keys;                                    // of another sequence
};

class SequenceParallelAttention {
 public:
  virtual ~SequenceParallelAttention() = default;

  // The schedule for these sequences and this mask. Build it once and use it for every layer and
  // step, or once for each batch of packed documents or spans. InvalidArgument for a mask that does
  // not fit. No communication.
  virtual absl::StatusOr<AttentionSchedule> Schedule(const Sequences& sequences,
                                                     const Mask& mask) const = 0;

  // The attention sinks of Forward from now on (FlashForwardParams::sinks), one for each head of q:
  // [num_heads] of SumDType(dtype of q), on its device; null: none.
  void SetSinks(const Tensor& sinks) { sinks_ = sinks; }
  const Tensor& sinks() const { return sinks_; }

  // The tensors of Forward that Backward needs: q, k, v, out and lse of the tokens and heads that
  // this rank computed, which depend on the strategy. The caller adds the gradients of Forward's
  // outputs: dout, like out, and dlse, like lse (null: zero).
  struct Saved {
    Tensor q, k, v, out, lse, dout, dlse;
    int64_t num_kv_heads = 0;  // of Forward's k and v; 0: k's
    WeightDropout dropout = {};
    Tensor sinks = {};  // Forward's; they are in out and lse, and only dsinks needs them
  };

  // How it changes scores; the model's softcap has to be among it.
  virtual ScoreOptions scores() const { return {}; }

  // Says which weights Forward drops from now on, if it drops any. `dropout` is equal on all ranks
  // of a sequence, with another seed for every layer and micro-batch. Backward uses the dropout of
  // its Forward.
  void SetDropout(const WeightDropout& dropout) { dropout_ = dropout; }
  void SetDropoutSeed(uint64_t seed) { dropout_ = {seed}; }  // of rows and heads from 0 on
  const WeightDropout& dropout() const { return dropout_; }

  // The largest score of each head in the last Forward, if its options ask for it (ScoreOptions),
  // else null. [batch, num_heads] float32, equal on all ranks. Scores are natural, after softcap
  // and ALiBi, over the queries and keys of all ranks; -inf where no query sees a key. For
  // optimizers that clip it (Kimi K2, arXiv 2507.20534).
  const Tensor& max_logits() const { return max_logits_; }

  // Collective, as Backward is.
  //
  // q:    [batch, length, num_heads, head_dim] of this rank's tokens, schedule.shard()
  //       .local_positions(), in order of position; innermost stride 1; float32, float64 or, on a
  //       GPU, bfloat16 or float16
  // k, v: [batch, length, num_kv_heads, head_dim]; num_kv_heads divides num_heads. In
  //       cross-attention they have the tokens of schedule.key_shard()
  // out:  like q, may be strided too; allocated when null
  // lse:  [batch, num_heads, length] of SumDType(dtype): the natural log of the softmax's
  //       denominator, -inf for a query that sees no key; allocated when null
  //
  // The pointers lse and saved may be null. InvalidArgument for what does not fit or what no kernel
  // serves; the communicator's error for a failed transfer.
  virtual absl::Status Forward(const AttentionSchedule& schedule, const Tensor& q, const Tensor& k,
                               const Tensor& v, Tensor* out, Tensor* lse, Saved* saved) = 0;

  // Assigns dq, dk, dv (like q, k, v; allocated when null). They may be strided, such as slices of
  // one tensor. dsinks: null, or becomes [parts, num_heads], whose sum over parts and ranks is the
  // gradient of the sinks. There is one part; ExactAttention has one for each of its calls.
  virtual absl::Status Backward(const AttentionSchedule& schedule, const Saved& saved, Tensor* dq,
                                Tensor* dk, Tensor* dv, Tensor* dsinks) = 0;
  absl::Status Backward(const AttentionSchedule& schedule, const Saved& saved, Tensor* dq,
                        Tensor* dk, Tensor* dv) {
    return Backward(schedule, saved, dq, dk, dv, /*dsinks=*/nullptr);
  }

  // For a Backward after a recomputation, which has kept `saved` of Forward without q, k and v:
  // puts q, k and v, equal to those of Forward, back into *saved. If Forward exchanges them between
  // ranks, Restore exchanges them again and is collective.
  virtual absl::Status Restore(const AttentionSchedule& schedule, const Tensor& q, const Tensor& k,
                               const Tensor& v, Saved* saved);

  // For callers that keep Forward's tensors alone: makes *saved, without gradients, from Forward's
  // arguments and results. Collective where Restore is; also sends out and lse.
  virtual absl::Status Rebuild(const AttentionSchedule& schedule, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Tensor& lse,
                               Saved* saved) {
    saved->out = out;
    saved->lse = lse;
    saved->dropout = dropout_;
    saved->sinks = sinks_;
    return Restore(schedule, q, k, v, saved);
  }

  // Returns the bytes that this rank sent since creation or ResetStats, and how many of them to
  // other nodes (0 without ranks_per_node).
  struct BytesSent {
    int64_t forward = 0, backward = 0;
    int64_t forward_between_nodes = 0, backward_between_nodes = 0;
  };
  virtual BytesSent bytes_sent() const = 0;
  virtual void ResetStats() = 0;

 protected:
  Tensor max_logits_;

 private:
  WeightDropout dropout_;
  Tensor sinks_;
};

// The attention sinks of an op on the tape. They are SetSinks of what the op calls.
struct AttentionSinks {
  Variable logits = {};  // [num_heads], of the dtype of q or of SumDType of that; undefined: none
  // Called when a part of their gradient (SequenceParallelAttention::Backward) is added, as
  // ChunkOptions::chunk_done is for a chunk's.
  std::function<void()> part_done = nullptr;
};

// The op on the tape; out: like q. `schedule` is kept until the backward. A failed transfer is
// reported through tape.status(). With `lse`, the log-sum-exp is returned too, and differentiable.
Variable AttentionOp(Tape& tape, SequenceParallelAttention& attention,
                     std::shared_ptr<const AttentionSchedule> schedule, const Variable& q,
                     const Variable& k, const Variable& v, Variable* lse = nullptr,
                     const AttentionSinks& sinks = {});

// The tensors that a recomputation (RecomputeInBackward, burst/autograd/tape.h) takes from the
// first run of an attention to the second, so that attention itself runs once. A second run would
// be expensive and, over a ring, send K and V again, while out and lse are as small as one
// activation.
struct KeptAttention {
  Tensor out;  // of all heads; null: nothing is kept yet
  // Without q, k, v, of every group of heads that attention takes at a time. Its `out` is null
  // where that is the group's heads of `out` above.
  std::vector<SequenceParallelAttention::Saved> saved;
  // Sequence-level (BurstEngine, arXiv 2509.19836): `out` and lse are of the tokens behind those of
  // this schedule, which are computed again. A prefix of the whole schedule (RingSchedule::Prefix);
  // null: `out` is of all tokens. Not of groups of heads.
  std::shared_ptr<const AttentionSchedule> again;
};

// One of the groups of heads that a layer's attention takes one after another.
struct HeadGroup {
  int64_t index = 0;
  int64_t count = 1;
};

// The op on the packed output of one projection, qkv [batch, length, num_heads + 2 num_kv_heads,
// head_dim]: the heads of Q, then of K, then of V. The kernels read and write slices of it; nothing
// is copied. out: [batch, length, num_heads, head_dim].
//
// With `kept`, the first of two runs on the same qkv leaves its result there. The second, which is
// the one that is differentiated, takes it. If these heads are one `group` of several, the caller
// puts kept->out together between the runs, and each takes its part.
Variable AttentionOp(Tape& tape, SequenceParallelAttention& attention,
                     std::shared_ptr<const AttentionSchedule> schedule, const Variable& qkv,
                     int64_t num_heads, int64_t num_kv_heads, KeptAttention* kept = nullptr,
                     const HeadGroup& group = {}, const AttentionSinks& sinks = {});

// ---- What all strategies share.
//
// InvalidArgument unless sinks are as SetSinks says; `needed`: and not null.
absl::Status CheckSinks(const Tensor& sinks, const Tensor& q, bool needed = false);
// InvalidArgument unless q, k, v fit together, as Forward says.
absl::Status CheckAttentionInputs(const Tensor& q, const Tensor& k, const Tensor& v);
// InvalidArgument unless q and k have a rank's tokens of a schedule. rows: batch rows that the
// schedule's mask describes; 1 for any batch.
absl::Status CheckFitsSchedule(const Tensor& q, const Tensor& k, int64_t q_length, int64_t k_length,
                               int64_t rows);
// Makes *output a tensor of the given shape, or checks that it is one, contiguous along the last
// axis at least.
absl::Status EnsureOutput(const char* name, const Shape& shape, DType dtype, DeviceType device,
                          Tensor* output);
// EnsureOutput for the gradients of saved.q, k and v.
absl::Status EnsureGradients(const SequenceParallelAttention::Saved& saved, Tensor* dq, Tensor* dk,
                             Tensor* dv);
inline Shape LseShape(const Tensor& q) { return {q.dim(0), q.dim(2), q.dim(1)}; }

}  // namespace burst
