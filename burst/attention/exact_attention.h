// Attention whose results are the same bits on any number of ranks, in any layout.
//
// A sequence is divided into chunks of a fixed number of tokens, of which a rank has some. Ranks
// gather the keys and values of the whole sequence. A kernel is called for every chunk of queries
// with the keys that it sees, so a call does not depend on the other ranks:
//
//    forward   out, lse of a chunk: one call
//    backward  dQ of a chunk: one call; the call's parts of dK and dV are added exactly
//              (burst/tensor/exact_sum.h) to those of the other chunks, on this rank and on others
//
// This is for comparing runs and finding errors. It is not for the longest sequences: every rank
// needs room for K and V of all tokens, and for their gradients in float64. A rank sends as many
// keys and values as in a ring, and gradients of twice the bytes.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/exact_sum.h"

namespace burst {

struct ExactAttentionOptions {
  Layout layout = Layout::kZigzag;  // its units are whole chunks
  double softmax_scale = 0;         // 0: 1 / sqrt(head_dim)
  int64_t chunk = 0;                // tokens; must divide the length of every sequence
  // Batch rows that a call takes at a time, the last one fewer; more than one if a chunk is a whole
  // sequence.
  int64_t rows = 1;
  // The grid to which the chunks' parts of dK and dV are rounded, in the scale of the caller's
  // gradients: ExactGrid::For(unit, chunks of a sequence).
  ExactGrid grid;
};

class ExactAttention : public SequenceParallelAttention {
 public:
  // `comm` must outlive the object; null: a single rank. InvalidArgument for bad options.
  static absl::StatusOr<std::unique_ptr<ExactAttention>> Create(
      const ExactAttentionOptions& options, Communicator* comm);

  // InvalidArgument also for a length that the chunk does not divide, and unless the positions of
  // every rank are whole chunks. Unimplemented for slices and for two sequences.
  absl::StatusOr<AttentionSchedule> Schedule(const Sequences& sequences,
                                             const Mask& mask) const override;

  // InvalidArgument also for a value_dim that is not head_dim.
  absl::Status Check(const AttentionCall& call) const override;
  absl::Status Forward(const AttentionCall& call, AttentionResult* result) override;
  absl::Status Backward(const AttentionCall& call, const AttentionResult& result,
                        AttentionGradients* gradients) override;

  BytesSent bytes_sent() const override { return sent_; }
  void ResetStats() override { sent_ = BytesSent(); }

 private:
  ExactAttention(const ExactAttentionOptions& options, Communicator* comm)
      : options_(options), comm_(comm) {}

  int ranks() const { return comm_ == nullptr ? 1 : comm_->world_size(); }
  // K and V of this rank's tokens -> of all tokens, in order of position.
  absl::Status GatherKeys(const AttentionCall& call, Tensor* all_k, Tensor* all_v);
  // Their gradients' sums of all tokens, [2, batch, seqlen, kv_heads, head_dim] float64 -> the sums
  // over the ranks of those of this rank's tokens.
  absl::StatusOr<Tensor> ReduceKeyGrads(const TokenShard& shard, const Tensor& sums);

  const ExactAttentionOptions options_;
  Communicator* const comm_;
  BytesSent sent_;
};

}  // namespace burst
