// Layers that own parameters: normalization and the two linear layers of tensor parallelism.
//
// A layer declares its parameters when it is constructed; ParameterList::Allocate gives them
// memory. Until then a layer must not move. Which rank has which shard of a parameter, and what
// the ranks exchange around a GEMM, is decided here and in TensorParallel; on one rank nothing is
// exchanged.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "burst/attention/sequence_parallel_attention.h"
#include "burst/autograd/chunks.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/ops/ops.h"
#include "model/parameters.h"
#include "model/tensor_parallel.h"

namespace burst {

// What the layers of one forward pass share.
struct ForwardPass {
  Tape& tape;
  // How the ranks share the model, and which tokens each has (may be null on one rank).
  const TensorParallel& parallel;
  std::shared_ptr<const TokenShard> shard;
  // Queries, keys and values of a layer, [batch, length, heads + 2 kv_heads, head_dim], to its
  // attention's output, [batch, length, heads, head_dim]; of all heads, or of a group of them.
  // sinks: of these heads, [heads], or undefined.
  std::function<Variable(const ForwardPass& pass, int64_t layer, const Variable& qkv,
                         const Variable& sinks, const HeadGroup& group)>
      attend = nullptr;
  std::shared_ptr<const RopeTable> rope = nullptr;  // llama
  double dropout_rate = 0;
  DropoutKey dropout = {};
  Tensor global_positions = {};  // [length] int32, of dropout
  // Of the layer, where it runs twice and attention shall not (AttentionOp); else null.
  std::shared_ptr<KeptAttention> kept_attention = nullptr;
  int64_t ffn_chunk = 0;  // tokens that a feed-forward takes at a time (RecomputeInChunks); 0: all
  // KV heads, with their query heads, that attention takes at a time (RecomputeInParts); 0: all. On
  // one rank of a model.
  int64_t head_chunk = 0;
  // Of the tokens whose attention a recomputation computes again (KeptAttention::again); null:
  // none.
  std::shared_ptr<const RingSchedule> recomputed_schedule = nullptr;
  // Of a pass that takes its tokens in chunks everywhere but in attention (set_exact); else null.
  std::shared_ptr<const ChunkOptions> chunks = nullptr;

  // The same on another tape, for one layer.
  ForwardPass On(Tape& other, std::shared_ptr<KeptAttention> kept) const {
    return {other,   parallel,         shard,           attend,    rope,       dropout_rate,
            dropout, global_positions, std::move(kept), ffn_chunk, head_chunk, recomputed_schedule,
            chunks};
  }
  // The same for one of its chunks.
  ForwardPass Of(const TokenChunk& chunk, Tape& other) const;
  // InChunks of functions that take, and make, a chunk's rows and tokens on such a pass.
  using ChunkStep =
      std::function<Variable(const ForwardPass& of_chunk, const std::vector<Variable>& inputs)>;
  Variable InChunks(const std::vector<Variable>& inputs, const Shape& trailing, DType dtype,
                    DeviceType device, const ChunkStep& step,
                    ResultUse use = ResultUse::kRead) const;
  // A place where dropout applies. 0 is the embedding; 1 + 2 l and 2 + 2 l are the attention and
  // the feed-forward of layer l.
  DropoutSite DropoutAt(int64_t site) const {
    return {dropout_rate, dropout, site, global_positions};
  }
};

// Where a layer declares its parameters.
struct LayerScope {
  const ModelConfig& config;  // WithDefaults
  const TensorParallel& parallel;
  ParameterList* parameters;
  std::string prefix;  // of the parameters' names: "layers.0.", or empty

  // Declares "<prefix><name>".
  void Add(const std::string& name, const Shape& shape, double init_mean, double init_std,
           bool decay, const ParameterSharding& sharding, Variable* variable) const;
};

// Normalization over the channels of x: [batch, length, width], like the result. Its parameters,
// [width] each, are replicated: `sharding` is TensorParallel::ReplicatedInLayers in a layer, else
// Replicated.
class Normalization {
 public:
  virtual ~Normalization() = default;
  virtual Variable Forward(const ForwardPass& pass, const Variable& x) const = 0;
};

class RmsNormalization : public Normalization {
 public:
  RmsNormalization(const LayerScope& scope, const std::string& name,
                   const ParameterSharding& sharding);
  Variable Forward(const ForwardPass& pass, const Variable& x) const override;

 private:
  const double eps_;
  Variable weight_;
};

class LayerNormalization : public Normalization {
 public:
  LayerNormalization(const LayerScope& scope, const std::string& name,
                     const ParameterSharding& sharding);
  Variable Forward(const ForwardPass& pass, const Variable& x) const override;

 private:
  const double eps_;
  Variable weight_, bias_;
};

// The parameters of a linear layer.
struct LinearParameters {
  Variable weight;  // [out, in]
  Variable bias;    // [out]; undefined without one
};

// y = x W^T + b, column-parallel: a rank computes some of the output channels for all tokens.
class ColumnParallelLinear {
 public:
  // The output is groups[0] + groups[1] + ... heads (or channels, with `unit` 1) of `unit` channels
  // each. Each group is sharded equally over the ranks; where it has fewer heads than there are
  // ranks, neighboring ranks replicate one. The bias is sharded as the rows of the weight are.
  ColumnParallelLinear(const LayerScope& scope, const std::string& name,
                       const std::vector<int64_t>& groups, int64_t unit, bool has_bias);

  // x: [batch, length, width], the residual stream after normalization.
  // Result: [batch, all tokens, this rank's channels].
  Variable Forward(const ForwardPass& pass, const Variable& x) const;

  // For an op that takes the layer's GEMM along with other work.
  const LinearParameters& parameters() const { return parameters_; }

 private:
  LinearParameters parameters_;
};

// y = residual + x W^T + b, row-parallel: a rank has some of the input channels, and its GEMM gives
// a partial result; the ranks add them up. It ends a branch of a layer, so its initial weights are
// smaller by sqrt(2 layers): the variance of the residual stream does not grow with the number of
// layers (Radford et al., 2019).
class RowParallelLinear {
 public:
  // The input is `count` heads (or channels, with `unit` 1) of `unit` channels each, sharded
  // equally over the ranks; the output has config.width channels. The bias is replicated.
  RowParallelLinear(const LayerScope& scope, const std::string& name, int64_t count, int64_t unit);

  // x: [batch, all tokens, this rank's channels].
  // residual (may be undefined) and result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                   ResultUse use = ResultUse::kRead) const;

  const LinearParameters& parameters() const { return parameters_; }

 private:
  LinearParameters parameters_;
};

}  // namespace burst
