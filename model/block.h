// One layer of a Transformer, with normalization before each branch (pre-norm):
//
//   x = x + dropout(attention(norm(x)))
//   x = x + dropout(ffn(norm(x)))
//
// A GPT-2 block and a Llama block are two recipes of the same four steps (block.cc).
#pragma once

#include <cstdint>
#include <memory>

#include "burst/autograd/tape.h"
#include "model/layers.h"

namespace burst {

// residual + attention(x): projections of all heads, normalization of queries and keys (qk_norm),
// RoPE (llama), causal attention, projection out.
class SelfAttention {
 public:
  enum class Rotation { kNone, kRope };
  SelfAttention(const LayerScope& scope, int64_t layer, Rotation rotation);

  // x, residual (may be undefined), result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual) const;

 private:
  const int64_t layer_;
  const int64_t head_dim_;
  const int64_t rotated_heads_;  // of this rank: queries and keys, or none
  ColumnParallelLinear qkv_;     // the query heads, then the KV heads' keys, then their values
  // With qk_norm: of this rank's query heads and of its KV heads' keys.
  NormalizedHeads query_norm_, key_norm_;
  const double norm_eps_;
  RowParallelLinear out_;
};

// residual + ffn(x), shapes as for SelfAttention. `use`: of the result (ops.h).
class FeedForward {
 public:
  virtual ~FeedForward() = default;
  virtual Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                           ResultUse use) const = 0;
};

class Block {
 public:
  // Declares the layer's parameters, in the order of the steps.
  Block(const LayerScope& scope, int64_t layer);

  // x: [batch, length, width], like the result: the residual stream.
  Variable Forward(const ForwardPass& pass, const Variable& x) const;

 private:
  void MakeGpt2(const LayerScope& scope);
  void MakeLlama(const LayerScope& scope);
  // residual + ffn(norm(x))
  Variable FeedForwardBranch(const ForwardPass& pass, const Variable& x,
                             const Variable& residual) const;

  int64_t layer_;
  std::unique_ptr<Normalization> attention_norm_;
  std::unique_ptr<SelfAttention> attention_;
  std::unique_ptr<Normalization> ffn_norm_;
  std::unique_ptr<FeedForward> ffn_;
};

}  // namespace burst
