// Tensor parallelism: the ranks of a group hold a model between them and work on the same
// sequences.
//
// In every layer the products into attention and into the feed-forward are column-parallel, those
// out of them row-parallel: a rank has a part of the heads and of the hidden channels, and its
// product with the rows is a part of the sum that is the result. Around the layers every rank has
// its part of the tokens, as with any other strategy: embedding, last norm, head and loss are whole
// on every rank and work on these tokens. (Shoeybi et al. split the vocabulary instead. Without
// that the head stays one fused op that sends nothing between the chunks of its logits; the price
// is whole tables on every rank and one gather of [tokens, width] at either end.)
//
//   kTp    (Megatron-LM, arXiv 1909.08053): inside the layers every rank has all tokens, for norms
//          and dropout too. A branch of a layer sends one all-reduce of [tokens, width] forward
//          and one backward.
//   kTpSp  (Korthikanti et al., arXiv 2205.05198): the residual stream, norms and dropout have this
//          rank's tokens. A branch sends an all-gather and a reduce-scatter forward; backward the
//          same, and once more the gather, because what was gathered is not kept.
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

  // One rank holds the model.
  TensorParallel() : exchange_(nullptr) {}
  // This rank of `group`, which must outlive the object and the tapes of its ops.
  // `sequence_parallel`: kTpSp.
  TensorParallel(Communicator* group, bool sequence_parallel);

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }

  // InvalidArgument, saying what would do, unless a model can be spread over `ranks` ranks: its
  // heads as for Ulysses, its ffn divisible.
  static absl::Status Check(const ModelConfig& config, int ranks);

  // ---- Parameters.

  // The split of a matrix whose rows (axis 0) or columns (axis 1) are groups of heads or channels,
  // one group behind the other: group i has blocks[i] heads or channels of `unit` rows each. A rank
  // has its part of each group; where there are fewer heads than ranks, several have the same one.
  ParameterSharding Sharded(int axis, const std::vector<int64_t>& blocks, int64_t unit) const;
  // A parameter that every rank holds: of the layers, or around them.
  ParameterSharding ReplicatedInLayers() const;
  ParameterSharding Replicated() const;
  // Heads, or channels, of this rank.
  int64_t LocalCount(int64_t count) const;

  // ---- Ops. x, y: [batch, length, width]. `shard` is that of this rank (RankGroup). A failed
  // transfer is reported through tape.status(). On one rank nothing is exchanged, the results are
  // the inputs, and `shard` may be null.

  // This rank's tokens -> the residual stream of the layers, and back.
  Variable ToLayers(Tape& tape, const Shard& shard, const Variable& x) const;
  Variable FromLayers(Tape& tape, const Shard& shard, const Variable& x) const;

  // A column-parallel op: y = gemm(all tokens of x, dx_done), where `gemm` calls dx_done in its
  // backward as Linear does (model/ops/linear.h); null on one rank.
  //
  // x: the residual stream's tokens. The gradient of x is summed over the ranks. What was gathered
  // is not kept for the backward, but gathered again. Both exchanges run beside those GEMMs of the
  // backward that do not need them.
  using ColumnGemm =
      std::function<Variable(const Variable& x, const std::function<void()>& dx_done)>;
  Variable ColumnParallel(Tape& tape, const Shard& shard, const Variable& x,
                          const ColumnGemm& gemm) const;

  // A row-parallel op: y = bias + residual + the sum over the ranks of their GEMMs of all tokens,
  // [batch, all tokens, width]. gemm(bias, addend) returns its GEMM plus `bias` and `addend`,
  // unless these are undefined: on one rank it adds all, else rank 0 adds the bias.
  //
  // y, residual (may be undefined): the residual stream's tokens.
  using RowGemm = std::function<Variable(const Variable& bias, const Variable& addend)>;
  Variable RowParallel(Tape& tape, const Shard& shard, const Variable& bias,
                       const Variable& residual, const RowGemm& gemm) const;

  // The positions of attention's tokens, [batch, all tokens], from those of this rank's, [batch,
  // length]; int32.
  Tensor AttentionPositions(Tape& tape, const Shard& shard, const Tensor& own) const;
  // Global positions of the residual stream's tokens within the layers.
  const std::vector<int32_t>& StreamPositions(const TokenShard& shard) const;

 private:
  // The exchanges for the tape: a failure is reported to the tape, and the results are zeros.
  Tensor Gather(Tape& tape, const TokenShard& shard, const Tensor& own) const;
  Tensor ReduceScatter(Tape& tape, const TokenShard& shard, const Tensor& all) const;
  void AllReduce(Tape& tape, const Tensor& all) const;

  // Before and after the GEMM of ColumnParallel.
  struct Columns {
    Variable x;  // of all tokens; for this GEMM only
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
