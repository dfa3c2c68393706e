// One layer of a Transformer, with normalization before each branch (pre-norm):
//
//   x = x + dropout(attention(norm(x)))
//   x = x + dropout(ffn(norm(x)))
//
// A GPT-2 block and a Llama block are two recipes of the same four steps (block.cc). How a step
// runs a layer to save memory is decided elsewhere (execution/).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "burst/autograd/tape.h"
#include "model/layers.h"

namespace burst {

// x + dropout(branch). branch(residual) returns the branch plus `residual`, unless that is
// undefined. Without dropout the branch's last GEMM adds x itself.
Variable Residual(const ForwardPass& pass, const Variable& x, int64_t dropout_site,
                  const std::function<Variable(const Variable& residual)>& branch);

// Attention with its projections: Q, K and V of all heads, normalization of queries and keys
// (qk_norm), RoPE (llama), causal attention (with attention_sinks), and the projection out.
class SelfAttention {
 public:
  enum class Rotation { kNone, kRope };
  SelfAttention(const LayerScope& scope, int64_t layer, Rotation rotation);

  // residual + attention(x). x: the layer's normalized input. x, residual (may be undefined) and
  // result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual) const;

  // The three steps of Forward, for executions in parts (execution/run_block.h). Project returns
  // what attention takes: [batch, length, heads + 2 kv_heads, head_dim].
  Variable Project(const ForwardPass& pass, const Variable& x) const;
  Variable Attend(const ForwardPass& pass, const Variable& qkv) const;
  // out: attention's result, [batch, length, heads, head_dim].
  Variable ProjectOut(const ForwardPass& pass, const Variable& out, const Variable& residual) const;

  // Attention of one group of KV heads with their query heads, of `count` equal groups. On one rank
  // of a model only. Linear returns the parameters that project to the group's heads.
  LinearParameters GroupProjection(Tape& tape, const HeadGroup& group) const;
  // projected: [batch, length, channels of the group].
  Variable AttendGroup(const ForwardPass& pass, const Variable& projected,
                       const HeadGroup& group) const;

  int64_t heads() const { return heads_; }        // this rank's
  int64_t kv_heads() const { return kv_heads_; }  // this rank's
  int64_t head_dim() const { return head_dim_; }
  bool is_full() const { return is_full_; }

 private:
  // Heads as attention takes them, normalized and rotated. projected: [batch, length, channels].
  Variable Heads(const ForwardPass& pass, const Variable& projected, const HeadGroup& group) const;

  const int64_t layer_;
  const int64_t head_dim_;
  const bool rotates_;
  const bool is_full_;  // ModelConfig::IsFull
  const int64_t heads_, kv_heads_;
  ColumnParallelLinear qkv_;        // the query heads, then the KV heads' keys, then their values
  Variable query_norm_, key_norm_;  // [head_dim]; with qk_norm
  const double norm_eps_;
  Variable sinks_;  // [heads]; with attention_sinks
  RowParallelLinear out_;
};

// The feed-forward of GPT-2 (GeluMlp) or Llama (SwiGluMlp). It is one op, around which the ranks
// exchange tokens.
class FeedForward {
 public:
  explicit FeedForward(const LayerScope& scope);

  // residual + ffn(x), shapes as for SelfAttention. use: what reads the result (ops.h).
  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                   ResultUse use) const;

 private:
  const bool gated_;  // SwiGLU
  ColumnParallelLinear first_;
  RowParallelLinear down_;
};

class Block {
 public:
  // Declares the layer's parameters, in the order of the steps.
  Block(const LayerScope& scope, int64_t layer);

  // Returns the residual stream after the layer. x and result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Variable& x) const;

  // residual + ffn(norm(x)). residual is x, or undefined.
  Variable FeedForwardBranch(const ForwardPass& pass, const Variable& x, const Variable& residual,
                             ResultUse use) const;

  int64_t layer() const { return layer_; }
  bool is_full() const { return attention_->is_full(); }  // ModelConfig::IsFull
  const Normalization& attention_norm() const { return *attention_norm_; }
  const SelfAttention& attention() const { return *attention_; }

 private:
  void MakeGpt2(const LayerScope& scope);
  void MakeLlama(const LayerScope& scope);

  int64_t layer_;
  std::unique_ptr<Normalization> attention_norm_;
  std::unique_ptr<SelfAttention> attention_;
  std::unique_ptr<Normalization> ffn_norm_;
  std::unique_ptr<FeedForward> ffn_;
};

}  // namespace burst
