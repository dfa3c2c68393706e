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
#include "burst/attention/attention_call.h"
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
  std::optional<Keys> keys;                                    // set if they are another sequence
  // The mask by which Layout::kBalanced spreads the tokens, so that schedules of several masks have
  // one shard. Unset: the schedule's own mask.
  std::optional<Mask> spread_by = std::nullopt;
};

class SequenceParallelAttention {
 public:
  virtual ~SequenceParallelAttention() = default;

  // The schedule for these sequences and this mask. Build it once and use it for every layer and
  // step, or once for each batch of packed documents or spans. InvalidArgument for a mask that does
  // not fit. No communication.
  virtual absl::StatusOr<AttentionSchedule> Schedule(const Sequences& sequences,
                                                     const Mask& mask) const = 0;

  // How it changes scores; the model's softcap has to be among it.
  virtual ScoreOptions scores() const { return {}; }

  // InvalidArgument for what does not fit, or what no kernel serves, as from Forward. No
  // communication.
  virtual absl::Status Check(const AttentionCall& call) const = 0;

  // Collective, as Backward is. Assigns what the call wants (AttentionResult). InvalidArgument for
  // what does not fit or what no kernel serves; the communicator's error for a failed transfer.
  virtual absl::Status Forward(const AttentionCall& call, AttentionResult* result) = 0;

  // `call` and `result` are Forward's, or equal ones: callers may as well put them together from
  // tensors that they kept.
  virtual absl::Status Backward(const AttentionCall& call, const AttentionResult& result,
                                AttentionGradients* gradients) = 0;

  // Returns the bytes that this rank sent since creation or ResetStats, and how many of them to
  // other nodes (0 without ranks_per_node).
  struct BytesSent {
    int64_t forward = 0, backward = 0;
    int64_t forward_between_nodes = 0, backward_between_nodes = 0;
  };
  virtual BytesSent bytes_sent() const = 0;
  virtual void ResetStats() = 0;
};

// What an op on the tape attends with.
struct TapeAttention {
  SequenceParallelAttention& attention;
  std::shared_ptr<const AttentionSchedule> schedule;  // kept until the backward
  WeightDropout dropout = {};
  Variable sinks = {};  // [num_heads], of the dtype of q or of SumDType of that; undefined: none
  // Called when a part of the sinks' gradient (AttentionGradients) is added, as
  // ChunkOptions::chunk_done is for a chunk's.
  std::function<void()> sinks_part_done = nullptr;
};

// The op on the tape; out: [batch, length, num_heads, value_dim of v]. A failed transfer is
// reported through tape.status(). With `lse`, the log-sum-exp is returned too, and differentiable.
Variable AttentionOp(Tape& tape, const TapeAttention& with, const Variable& q, const Variable& k,
                     const Variable& v, Variable* lse = nullptr);

// The tensors that a recomputation (RecomputeInBackward, burst/autograd/tape.h) takes from the
// first run of an attention to the second, so that attention itself runs once. A second run would
// be expensive and, over a ring, send K and V again, while out and lse are as small as one
// activation.
struct KeptAttention {
  Tensor out;  // all heads; null: nothing is kept yet
  // A result for every group of heads that attention takes at a time. Its `out` is null, since it
  // is the group's heads of `out` above, and so are the exchanged q, k and v.
  std::vector<AttentionResult> results;
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
Variable AttentionOp(Tape& tape, const TapeAttention& with, const Variable& qkv, int64_t num_heads,
                     int64_t num_kv_heads, KeptAttention* kept = nullptr,
                     const HeadGroup& group = {});

}  // namespace burst
