#include "model/block.h"

#include <functional>

#include "burst/base/progress.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// Views the elements of x under another shape.
Variable Reshape(Tape& tape, const Variable& x, const Shape& shape) {
  const Variable y = tape.Output(x.value().View(shape), {x});
  if (tape.NeedsGrad({x})) {
    tape.Record("reshape", {y},
                [=] { x.AddGrad(y.grad().Contiguous().View(x.shape()), y.grad_amax()); });
  }
  return y;
}

}  // namespace

FeedForward::FeedForward(const LayerScope& scope)
    : gated_(scope.config.family == Family::kLlama),
      gate_(scope.config.gate),
      first_(scope, gated_ ? "ffn.gate_up" : "ffn.up",
             std::vector<int64_t>(gated_ ? 2 : 1, scope.config.ffn), 1,
             scope.config.has_ffn_bias()),
      down_(scope, "ffn.down", scope.config.ffn, 1, scope.config.has_ffn_bias()) {}

Variable FeedForward::Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                              ResultUse use) const {
  const LinearParameters &first = first_.parameters(), &down = down_.parameters();
  const LinearPrecision precision = pass->linear_precision;
  return pass->parallel->RowParallel(
      pass.tape, pass->shard, down.bias, residual,
      [&](const Variable& down_bias, const Variable& addend) {
        return pass->parallel->ColumnParallel(
            pass.tape, pass->shard, x,
            [&](const Variable& all, const std::function<void()>& dx_done) {
              const auto mlp = !gated_ ? GeluMlp : gate_ == Gate::kGelu ? GeGluMlp : SwiGluMlp;
              return mlp(pass.tape, all, first.weight, first.bias, down.weight, down_bias, addend,
                         dx_done, use, precision);
            });
      });
}

SelfAttention::SelfAttention(const LayerScope& scope, int64_t layer)
    : layer_(layer),
      head_dim_(scope.config.head_dim),
      rotates_(scope.config.family == Family::kLlama),
      is_full_(scope.config.IsFull(layer)),
      heads_(scope.parallel.LocalCount(scope.config.heads)),
      kv_heads_(scope.parallel.LocalCount(scope.config.kv_heads)),
      qkv_(scope, "attention.qkv",
           {scope.config.heads, scope.config.kv_heads, scope.config.kv_heads}, head_dim_,
           scope.config.has_qkv_bias()),
      norms_all_(scope.config.qk_norm == QkNorm::kAll),
      norm_eps_(scope.config.norm_eps),
      norm_offset_(scope.config.unit_offset_norms ? 1 : 0),
      out_(scope, "attention.out", scope.config.heads, head_dim_, scope.config.has_out_bias()) {
  if (scope.config.attention_sinks) {
    const ParameterSharding by_heads = scope.parallel.Sharded(/*axis=*/0, {scope.config.heads}, 1);
    scope.Add("attention.sinks", {scope.config.heads}, 0, 0, false, by_heads, &sinks_);
  }
  if (scope.config.qk_norm == QkNorm::kNone) return;
  const auto add = [&](const char* name, int64_t heads, Variable* weight) {
    // A weight of one head is for every rank's heads, which give a part of its gradient each.
    const ParameterSharding sharding = norms_all_
                                           ? scope.parallel.Sharded(/*axis=*/0, {heads}, head_dim_)
                                           : scope.parallel.Replicated();
    scope.Add(name, {(norms_all_ ? heads : 1) * head_dim_}, 1 - norm_offset_, 0, false, sharding,
              weight);
  };
  add("attention.q_norm.weight", scope.config.heads, &query_norm_);
  add("attention.k_norm.weight", scope.config.kv_heads, &key_norm_);
}

Variable SelfAttention::Forward(const ForwardPass& pass, const Variable& x,
                                const Variable& residual) const {
  return ProjectOut(pass, Attend(pass, Project(pass, x)), residual);
}

Variable SelfAttention::Project(const ForwardPass& pass, const Variable& x) const {
  return Heads(pass, qkv_.Forward(pass, x), {});
}

Variable SelfAttention::Attend(const ForwardPass& pass, const Variable& qkv) const {
  return pass->attend(pass, layer_, qkv, sinks_, {});
}

Variable SelfAttention::ProjectOut(const ForwardPass& pass, const Variable& out,
                                   const Variable& residual) const {
  const Shape& shape = out.shape();
  return out_.Forward(pass, Reshape(pass.tape, out, {shape[0], shape[1], shape[2] * head_dim_}),
                      residual);
}

LinearParameters SelfAttention::GroupProjection(Tape& tape, const HeadGroup& group) const {
  const int64_t q = heads_ / group.count * head_dim_, kv = kv_heads_ / group.count * head_dim_;
  const int64_t keys = heads_ * head_dim_, values = keys + kv_heads_ * head_dim_;
  const std::vector<RowRange> rows = {
      {group.index * q, q}, {keys + group.index * kv, kv}, {values + group.index * kv, kv}};
  const LinearParameters& all = qkv_.parameters();
  return {SelectRows(tape, all.weight, rows),
          all.bias.defined() ? SelectRows(tape, all.bias, rows) : Variable()};
}

Variable SelfAttention::AttendGroup(const ForwardPass& pass, const Variable& projected,
                                    const HeadGroup& group) const {
  const int64_t heads = heads_ / group.count;
  const Variable sinks =
      sinks_.defined() ? SelectRows(pass.tape, sinks_, {{group.index * heads, heads}}) : Variable();
  return pass->attend(pass, layer_, Heads(pass, projected, group), sinks, group);
}

Variable SelfAttention::Heads(const ForwardPass& pass, const Variable& projected,
                              const HeadGroup& group) const {
  const Shape& shape = projected.shape();
  const int64_t heads = heads_ / group.count, kv_heads = kv_heads_ / group.count;
  Variable qkv =
      Reshape(pass.tape, projected, {shape[0], shape[1], shape[2] / head_dim_, head_dim_});
  if (query_norm_.defined()) {
    HeadRanks ranks;
    if (norms_all_) {
      ranks = {pass->parallel->ranks(),
               [parallel = pass->parallel, &tape = pass.tape](const Tensor& numbers) {
                 parallel->AllReduce(tape, numbers);
               }};
    }
    qkv = RmsNormHeads(pass.tape, qkv, {query_norm_, heads}, {key_norm_, kv_heads}, norm_eps_,
                       norm_offset_, ranks);
  }
  if (!rotates_) return qkv;
  return Rope(pass.tape, qkv, pass->rope[is_full_], heads + kv_heads, pass->linear_precision);
}

Block::Block(const LayerScope& scope, int64_t layer) : layer_(layer) {
  const NormPosition position = scope.config.norm_position;
  const auto norm = [&](bool there, const char* name) {
    return there ? MakeNormalization(scope, name, scope.parallel.ReplicatedInLayers()) : nullptr;
  };
  const bool before = position != NormPosition::kAfter, after = position != NormPosition::kBefore;
  attention_norm_ = norm(before, "attention_norm");
  attention_ = std::make_unique<SelfAttention>(scope, layer_);
  attention_out_norm_ = norm(after, "attention_out_norm");
  ffn_norm_ = norm(before, "ffn_norm");
  ffn_ = std::make_unique<FeedForward>(scope);
  ffn_out_norm_ = norm(after, "ffn_out_norm");
}

Variable Block::Add(const ForwardPass& pass, const Variable& x, int64_t dropout_site,
                    const Norm& norm, const Branch& branch) const {
  const DropoutSite dropout = pass.DropoutAt(dropout_site);
  if (norm == nullptr && !dropout.active()) return branch(x);
  Variable y = branch(Variable());
  if (norm != nullptr) y = norm->Forward(pass, y);
  return dropout.active() ? Dropout(pass.tape, y, dropout, x) : burst::Add(pass.tape, x, y);
}

Variable Block::AddAttention(const ForwardPass& pass, const Variable& x,
                             const Branch& attention) const {
  return Add(pass, x, AttentionSite(layer_), attention_out_norm_, attention);
}

Variable Block::AddFeedForward(const ForwardPass& pass, const Variable& x,
                               const Branch& ffn) const {
  return Add(pass, x, FeedForwardSite(layer_), ffn_out_norm_, ffn);
}

Variable Block::AttentionInput(const ForwardPass& pass, const Variable& x,
                               LinearPrecision reader) const {
  return attention_norm_ == nullptr ? x : attention_norm_->Forward(pass, x, reader);
}

Variable Block::FeedForwardBranch(const ForwardPass& pass, const Variable& x,
                                  const Variable& residual, ResultUse use) const {
  const Variable input =
      ffn_norm_ == nullptr ? x : ffn_norm_->Forward(pass, x, pass->linear_precision);
  return ffn_->Forward(pass, input, residual, use);
}

Variable Block::Forward(const ForwardPass& pass, const Variable& x) const {
  ReachOp(static_cast<int>(layer_), "projections", /*on_device=*/true);
  const Variable h = AddAttention(pass, x, [&](const Variable& residual) {
    return attention_->Forward(pass, AttentionInput(pass, x, pass->linear_precision), residual);
  });
  ReachOp(static_cast<int>(layer_), "feed-forward");
  return AddFeedForward(pass, h, [&](const Variable& residual) {
    const bool ends = residual.defined();  // the branch's result is the layer's result
    return FeedForwardBranch(pass, h, residual, ends ? pass.tape.result_use() : ResultUse::kRead);
  });
}

}  // namespace burst
