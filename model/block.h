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

// residual + attention(norm(x)): projections of all heads, normalization of queries and keys
// (qk_norm), RoPE (llama), causal attention (with attention_sinks), projection out.
class SelfAttention {
 public:
  enum class Rotation { kNone, kRope };
  SelfAttention(const LayerScope& scope, int64_t layer, Rotation rotation);

  // x, residual (may be undefined), result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Normalization& norm, const Variable& x,
                   const Variable& residual) const;

  // The three parts of it, for passes in chunks. What attention takes of norm(x): [batch, length,
  // heads + 2 kv_heads, head_dim].
  Variable Project(const ForwardPass& pass, const Normalization& norm, const Variable& x) const;
  Variable Attend(const ForwardPass& pass, const Variable& qkv) const;
  // out: attention's result, [batch, length, heads, head_dim].
  Variable ProjectOut(const ForwardPass& pass, const Variable& out, const Variable& residual) const;
  Shape ProjectedShape() const { return {heads_ + 2 * kv_heads_, head_dim_}; }

 private:
  // The result of all heads, [batch, length, heads, head_dim], group by group; of a group, from x
  // or, without `norm`, from norm(x).
  Variable AttendInGroups(const ForwardPass& pass, const Normalization& norm,
                          const Variable& x) const;
  Variable AttendGroup(const ForwardPass& pass, const Normalization* norm, const Variable& x,
                       const HeadGroup& group) const;
  // Heads as attention takes them, of those that are projected: [batch, length, channels].
  Variable Heads(const ForwardPass& pass, const Variable& projected, const HeadGroup& group) const;

  const int64_t layer_;
  const int64_t head_dim_;
  const bool rotates_;
  const int64_t heads_, kv_heads_;  // of this rank
  ColumnParallelLinear qkv_;        // the query heads, then the KV heads' keys, then their values
  Variable query_norm_, key_norm_;  // [head_dim]; with qk_norm
  const double norm_eps_;
  Variable sinks_;  // [heads]; with attention_sinks
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
  Variable ForwardInChunks(const ForwardPass& pass, const Variable& x) const;
  // h + dropout(ffn(norm(h))).
  Variable AddFeedForward(const ForwardPass& pass, const Variable& h) const;
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
