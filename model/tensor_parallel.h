// Tensor parallelism: the ranks of a group share the weights of the layers and work on the same
// sequences.
//
// In every layer, the GEMMs into attention and into the feed-forward are column-parallel, those out
// of them row-parallel. A rank has a shard of the heads and of the hidden channels; its
// row-parallel GEMM gives a partial result, and the ranks add up their partial results. Outside the
// layers every rank has its shard of the tokens, as with any other strategy. Embedding, final
// normalization, head and loss are replicated and work on these tokens. (Shoeybi et al. shard the
// vocabulary instead. Here the head stays one fused op, which communicates nothing between the
// chunks of its logits. The price is a replicated table and one gather of [tokens, width] at either
// end.)
//
//   tp     (Megatron-LM, arXiv 1909.08053): inside the layers every rank has all tokens, for
//          normalization and dropout too. A branch of a layer sends one all-reduce of [tokens,
//          width] forward and one backward.
//   tp+sp  (Korthikanti et al., arXiv 2205.05198): the residual stream, normalization and dropout
//          have this rank's tokens. A branch sends an all-gather and a reduce-scatter forward;
//          backward the same, and the all-gather once more, because its result is not saved.
//
// A norm of queries and of keys over all heads (QkNorm::kAll) sends one all-reduce of two numbers a
// token forward and one backward.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "burst/autograd/tape.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/token_exchange.h"
#include "burst/sequence/token_shard.h"
#include "model/config.h"
#include "model/parameters.h"

namespace burst {

class TensorParallel {
 public:
  using Shard = std::shared_ptr<const TokenShard>;

  // No tensor parallelism: one rank has the whole model.
  TensorParallel() : exchange_(nullptr) {}
  // This rank of `group`, which must outlive the object and the tapes of its ops.
  // `sequence_parallel`: tp+sp, as in training; tp is its rival in //benchmarks:scaling.
  TensorParallel(Communicator* group, bool sequence_parallel);

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

  // InvalidArgument, which names `ranks` by `name`, unless a model can be sharded over `ranks`
  // ranks: its heads as for Ulysses, its ffn divisible.
  static absl::Status Check(absl::string_view name, const ModelConfig& config, int ranks);

  // ---- Parameters.

  // A matrix sharded by rows (axis 0) or columns (axis 1), which are consecutive groups of heads or
  // channels. Group i has blocks[i] heads (or channels) of `unit` rows each. Each group is sharded
  // equally. If it has fewer heads than there are ranks, neighboring ranks replicate one.
  ParameterSharding Sharded(int axis, const std::vector<int64_t>& blocks, int64_t unit) const;
  // A parameter that every rank has: in the layers, or outside them.
  ParameterSharding ReplicatedInLayers() const;
  ParameterSharding Replicated() const;
  // Returns how many of `count` heads, or channels, this rank has.
  int64_t LocalCount(int64_t count) const;

  // ---- Ops. x, y: [batch, length, width]. `shard` is this rank's (RankGroup). A failed
  // transfer is reported through tape.status(). On one rank nothing is exchanged, the results are
  // the inputs, and `shard` may be null.

  // This rank's tokens -> the residual stream of the layers, and back.
  Variable ToLayers(Tape& tape, const Shard& shard, const Variable& x) const;
  Variable FromLayers(Tape& tape, const Shard& shard, const Variable& x) const;

  // A column-parallel op: y = gemm(all tokens of x, dx_done), where `gemm` calls dx_done in its
  // backward as Linear does (model/ops/ops.h); null on one rank.
  //
  // x: the residual stream's tokens. The gradient of x is summed over the ranks. The
  // gathered tokens are not kept for the backward, but gathered again. Both exchanges overlap with
  // the GEMMs of the backward that do not need them.
  using ColumnGemm =
      std::function<Variable(const Variable& x, const std::function<void()>& dx_done)>;
  Variable ColumnParallel(Tape& tape, const Shard& shard, const Variable& x,
                          const ColumnGemm& gemm) const;

  // A row-parallel op. It computes y = bias + residual + the sum over the ranks of their GEMMs.
  // Each GEMM has all tokens: [batch, all tokens, width]. The function gemm(bias, addend) returns
  // its GEMM plus `bias` and `addend`, unless these are undefined. On one rank the GEMM adds both;
  // on several, rank 0 adds the bias.
  //
  // y, residual (may be undefined): the residual stream's tokens.
  using RowGemm = std::function<Variable(const Variable& bias, const Variable& addend)>;
  Variable RowParallel(Tape& tape, const Shard& shard, const Variable& bias,
                       const Variable& residual, const RowGemm& gemm) const;

  // Replaces `numbers`, contiguous, by their sums over the ranks.
  void AllReduce(Tape& tape, const Tensor& numbers) const;

  // The positions of attention's tokens, [batch, all tokens], from those of this rank's, [batch,
  // length]; int32.
  Tensor AttentionPositions(Tape& tape, const Shard& shard, const Tensor& own) const;
  // Global positions of the residual stream's tokens within the layers.
  const std::vector<int32_t>& StreamPositions(const TokenShard& shard) const;

 private:
  // The exchanges for the tape: a failure is reported to the tape, and the results are zeros.
  Tensor Gather(Tape& tape, const TokenShard& shard, const Tensor& own) const;
  Tensor ReduceScatter(Tape& tape, const TokenShard& shard, const Tensor& all) const;

  // Before and after the GEMM of ColumnParallel.
  struct Columns {
    Variable x;  // has all tokens; for this GEMM only
    std::function<void()> dx_done;
    std::shared_ptr<TokenExchange::Pending> pending;
  };
  Columns BeginColumns(Tape& tape, const Shard& shard, const Variable& x) const;
  void EndColumns(Tape& tape, const Shard& shard, const Variable& x, const Columns& columns) const;
  // `partial` summed over the ranks, plus `residual` unless that is undefined. `partial` loses its
  // memory, or the result takes it over.
  Variable SumRows(Tape& tape, const Shard& shard, const Variable& partial,
                   const Variable& residual) const;

  int ranks_ = 1, rank_ = 0;
  bool sequence_parallel_ = false;
  TokenExchange exchange_;
};

}  // namespace burst
