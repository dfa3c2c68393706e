// SequenceParallelAttention: exact attention over a sequence whose tokens are spread over ranks,
// however the ranks cooperate. BurstAttention passes blocks around a ring
// (burst_attention.h), UlyssesAttention exchanges tokens for heads (ulysses_attention.h);
// strategy.h makes one by name. A model calls AttentionOp and knows no more.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/ring/schedule.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

class SequenceParallelAttention {
 public:
  virtual ~SequenceParallelAttention() = default;

  // The schedule for sequences of `seqlen` tokens in all (any number, also fewer than ranks). Build
  // it once and use it for every layer and step, or once per batch of packed documents.
  virtual absl::StatusOr<RingSchedule> Schedule(int64_t seqlen,
                                                const DocumentStarts& documents = {}) const = 0;

  // What Backward needs from Forward. q, k, v, out and lse are those of the tokens and heads that
  // this rank worked on, which depend on the strategy. The caller adds the gradients of Forward's
  // outputs: dout, like out, and dlse, like lse (null: zero).
  struct Saved {
    Tensor q, k, v, out, lse, dout, dlse;
    int64_t num_kv_heads = 0;  // of Forward's k and v; 0: k's
  };

  // Collective, as Backward is.
  //
  // q: [batch, length, num_heads, head_dim], k, v: [batch, length, num_kv_heads, head_dim] of this
  // rank's `length` tokens, those at schedule.shard().local_positions(), in order of position;
  // innermost stride 1; float32, float64 or, on a GPU, bfloat16 (InvalidArgument for what no kernel
  // serves). num_kv_heads divides num_heads. out: like q, may be strided too; lse: [batch,
  // num_heads, length], natural log of the softmax's denominator, -inf for a query that sees no
  // key, of SumDType(dtype). Both tensors are allocated when null. The pointers lse and saved may
  // be null if they are not needed.
  virtual absl::Status Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                               const Tensor& v, Tensor* out, Tensor* lse, Saved* saved) = 0;

  // Assigns dq, dk, dv (like q, k, v; allocated when null; may be strided: slices of one tensor).
  virtual absl::Status Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq,
                                Tensor* dk, Tensor* dv) = 0;

  // Puts q, k and v, equal to those of Forward, back into what that left in `saved`, for a Backward
  // after a recomputation, which kept the rest only. Where Forward exchanges them for those of
  // other heads, Restore does so again. Collective there.
  virtual absl::Status Restore(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                               const Tensor& v, Saved* saved);

  // What this rank sent since creation or ResetStats, and how much of it left the node (0 without
  // ranks_per_node).
  struct BytesSent {
    int64_t forward = 0, backward = 0;
    int64_t forward_between_nodes = 0, backward_between_nodes = 0;
  };
  virtual BytesSent bytes_sent() const = 0;
  virtual void ResetStats() = 0;
};

// The op on the tape; out: like q. `schedule` is kept until the backward. A failed transfer is
// reported through tape.status(). With `lse`, the log-sum-exp is returned too, and differentiable.
Variable AttentionOp(Tape& tape, SequenceParallelAttention& attention,
                     std::shared_ptr<const RingSchedule> schedule, const Variable& q,
                     const Variable& k, const Variable& v, Variable* lse = nullptr);

// What a recomputation (burst/autograd/recompute.h) hands from the first run of an attention to the
// second, so that attention itself is not computed again: it is dear, and over a ring q, k and v
// would travel again, while out and lse are as small as one activation.
struct KeptAttention {
  Tensor out;                              // null: nothing is kept yet
  SequenceParallelAttention::Saved saved;  // without q, k, v
};

// The same on the packed output of one projection, qkv [batch, length, num_heads + 2 num_kv_heads,
// head_dim]: the query heads, then the keys', then the values'. Nothing is split or joined: the
// kernels read and write slices. out: [batch, length, num_heads, head_dim].
//
// With `kept`, the first of two runs on the same qkv leaves its result there, and the second, which
// is the one that is differentiated, takes it from there.
Variable AttentionOp(Tape& tape, SequenceParallelAttention& attention,
                     std::shared_ptr<const RingSchedule> schedule, const Variable& qkv,
                     int64_t num_heads, int64_t num_kv_heads, KeptAttention* kept = nullptr);

// Checks that all strategies make.
//
// InvalidArgument unless q, k, v fit together, as Forward says.
absl::Status CheckAttentionInputs(const Tensor& q, const Tensor& k, const Tensor& v);
// Makes *output a tensor of the given shape, or checks that it is one, contiguous along the last
// axis at least.
absl::Status EnsureOutput(const char* name, const Shape& shape, DType dtype, DeviceType device,
                          Tensor* output);
inline Shape LseShape(const Tensor& q) { return {q.dim(0), q.dim(2), q.dim(1)}; }

}  // namespace burst
