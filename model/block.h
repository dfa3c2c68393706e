// One layer of a Transformer, with normalization before its two branches, after them, or both
// (NormPosition):
//
//   x = x + dropout(norm(attention(norm(x))))
//   x = x + dropout(norm(ffn(norm(x))))
//
// How a step runs a layer to save memory is decided elsewhere (execution/).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "burst/autograd/tape.h"
#include "model/layers.h"

namespace burst {

// Attention with its projections: Q, K and V of all heads, normalization of queries and keys
// (qk_norm), RoPE (llama), causal attention (with attention_sinks), and the projection out.
class SelfAttention {
 public:
  SelfAttention(const LayerScope& scope, int64_t layer);

  // residual + attention(x). x: Block::AttentionInput. x, residual (may be undefined) and
  // result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual) const;

  // The three steps of Forward, for executions in parts (execution/layer_runner.h). Project returns
  // what attention takes: [batch, length, heads + 2 kv_heads, head_dim].
  Variable Project(const ForwardPass& pass, const Variable& x) const;
  Variable Attend(const ForwardPass& pass, const Variable& qkv) const;
  // out: attention's result, [batch, length, heads, head_dim].
  Variable ProjectOut(const ForwardPass& pass, const Variable& out, const Variable& residual) const;

  // Attention of one group of KV heads with their query heads, of `count` equal groups. On one rank
  // of a model only, and not with QkNorm::kAll. Linear returns the parameters that project to the
  // group's heads.
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
  const bool norms_all_;            // QkNorm::kAll
  Variable query_norm_, key_norm_;  // [head_dim], or [channels of this rank's heads]; with qk_norm
  const double norm_eps_, norm_offset_;
  Variable sinks_;  // [heads]; with attention_sinks
  RowParallelLinear out_;
};

// The feed-forward of GPT-2 (GeluMlp), Llama (SwiGluMlp) or Gemma (GeGluMlp). It is one op, around
// which the ranks exchange tokens.
class FeedForward {
 public:
  explicit FeedForward(const LayerScope& scope);

  // residual + ffn(x), shapes as for SelfAttention. use: what reads the result (ops.h).
  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                   ResultUse use) const;

 private:
  const bool gated_;  // llama
  const Gate gate_;
  ColumnParallelLinear first_;
  RowParallelLinear down_;
};

class Block {
 public:
  // Declares the layer's parameters, in the order of the steps.
  Block(const LayerScope& scope, int64_t layer);

  // Returns the residual stream after the layer. x and result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Variable& x) const;

  // ---- The steps of Forward, for executions in parts. Every x and result: [batch, length, width].

  // Returns a branch plus `residual`, unless that is undefined.
  using Branch = std::function<Variable(const Variable& residual)>;
  // Return x plus the branch, normalized and with dropout as the layer says. If the layer does
  // neither, the branch's last GEMM adds x itself.
  Variable AddAttention(const ForwardPass& pass, const Variable& x, const Branch& attention) const;
  Variable AddFeedForward(const ForwardPass& pass, const Variable& x, const Branch& ffn) const;

  // What attention takes: x, normalized if the layer normalizes before its branches. `reader` is
  // the precision of the linear layers that read the result.
  Variable AttentionInput(const ForwardPass& pass, const Variable& x,
                          LinearPrecision reader = LinearPrecision::kTensors) const;
  // residual + ffn(norm(x)), without the norm after it. residual is x, or undefined.
  Variable FeedForwardBranch(const ForwardPass& pass, const Variable& x, const Variable& residual,
                             ResultUse use) const;

  int64_t layer() const { return layer_; }
  bool is_full() const { return attention_->is_full(); }  // ModelConfig::IsFull
  const SelfAttention& attention() const { return *attention_; }

 private:
  // Null: the layer does not normalize there.
  using Norm = std::unique_ptr<Normalization>;
  Variable Add(const ForwardPass& pass, const Variable& x, int64_t dropout_site, const Norm& norm,
               const Branch& branch) const;

  int64_t layer_;
  Norm attention_norm_, attention_out_norm_;
  std::unique_ptr<SelfAttention> attention_;
  Norm ffn_norm_, ffn_out_norm_;
  std::unique_ptr<FeedForward> ffn_;
};

}  // namespace burst
