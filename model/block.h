// One layer of a Transformer, pre-norm:
//
//   x = x + dropout(attention(norm(x)))
//   x = x + dropout(ffn(norm(x)))
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "burst/attention/sequence_parallel_attention.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/ops/dropout.h"
#include "model/ops/rope.h"
#include "model/parameters.h"
#include "model/tensor_parallel.h"

namespace burst {

// Standard deviation of the embeddings' initial weights (and with them of a tied head): GPT-2's.
inline constexpr double kEmbeddingStd = 0.02;

// What the layers of one forward pass share.
struct ForwardPass {
  Tape& tape;
  // Queries, keys and values of a layer, [batch, length, heads + 2 kv_heads, head_dim], to its
  // attention's output, [batch, length, heads, head_dim].
  std::function<Variable(const ForwardPass& pass, int64_t layer, const Variable& qkv)> attend;
  std::shared_ptr<const RopeTable> rope;  // llama
  DropoutKey dropout;
  Tensor global_positions;  // [length] int32, of dropout
  // With tensor parallelism, else null: how ranks share the model, and which tokens
  // each has.
  const TensorParallel* parallel = nullptr;
  std::shared_ptr<const TokenShard> shard = nullptr;
  // Of the layer, where it runs twice and attention shall not (AttentionOp); else null.
  std::shared_ptr<KeptAttention> kept_attention = nullptr;

  // The same on another tape, for one layer.
  ForwardPass On(Tape& other, std::shared_ptr<KeptAttention> kept) const {
    return {other, attend, rope, dropout, global_positions, parallel, shard, std::move(kept)};
  }
};

struct Norm {
  Variable weight;  // [width]
  Variable bias;    // [width], gpt2

  void Declare(const ModelConfig& config, const std::string& name, const ParameterSharing& sharing,
               ParameterList* parameters);
  Variable Forward(const ForwardPass& pass, const ModelConfig& config, const Variable& x) const;
};

struct Dense {
  Variable weight;  // [out, in]
  Variable bias;    // [out], gpt2

  // The bias is split as the rows of the weight are; where the weight is split by columns, every
  // rank has the whole bias.
  void Declare(const ModelConfig& config, const std::string& name, int64_t out, int64_t in,
               double init_std, const TensorParallel& parallel, const ParameterSharing& sharing,
               ParameterList* parameters);
  Variable Forward(const ForwardPass& pass, const Variable& x) const;
  // The bias that this rank adds to its part of a row-parallel product, which is summed over the
  // ranks: rank 0 of the group adds it, on the others it is undefined.
  Variable RowBias(const ForwardPass& pass) const;
};

class Block {
 public:
  // Declares the layer's parameters. ParameterList::Allocate makes them; until then the block must
  // not move.
  void Declare(const ModelConfig& config, int64_t layer, const TensorParallel& parallel,
               ParameterList* parameters);

  // x: [batch, length, width], like the result: the residual stream.
  Variable Forward(const ForwardPass& pass, const Variable& x) const;

 private:
  Variable Attention(const ForwardPass& pass, const Variable& x) const;  // before out_
  Variable Project(const ForwardPass& pass, const Dense& dense, const Variable& x) const;
  Variable AddFeedForward(const ForwardPass& pass, const Variable& h, const Variable& x) const;
  Variable AddBranch(const ForwardPass& pass, const Variable& x, const Dense& projection,
                     const Variable& branch, int64_t dropout_site) const;

  ModelConfig config_;
  int64_t layer_ = 0;
  int64_t rotated_heads_ = 0;  // of this rank: those of queries and keys
  Norm attention_norm_, ffn_norm_;
  Dense qkv_, out_;  // qkv: the rows of all query heads, then the key heads, then the value heads
  Dense up_, down_;  // up, llama: the rows of the gate, then those of what it gates
};

// The place of a dropout: 0 is the embedding, 1 + 2 layer and 2 + 2 layer the branches of a layer.
DropoutSite DropoutAt(const ForwardPass& pass, const ModelConfig& config, int64_t site);

}  // namespace burst
