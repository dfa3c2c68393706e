#include "model/block.h"

#include <functional>

#include "burst/base/check.h"
#include "burst/base/progress.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// The same elements under another shape.
Variable Reshape(Tape& tape, const Variable& x, const Shape& shape) {
  const Variable y = tape.Output(x.value().View(shape), {x});
  if (tape.NeedsGrad({x})) {
    tape.Record("reshape", {y}, [=] { x.AddGrad(y.grad().Contiguous().View(x.shape())); });
  }
  return y;
}

// gelu(x up^T + b) down^T + b, one op: on a GPU its GEMMs apply GELU and the biases (GeluMlp,
// ops.h).
class GeluFeedForward : public FeedForward {
 public:
  explicit GeluFeedForward(const LayerScope& scope)
      : up_(scope, "ffn.up", {scope.config.ffn}, 1, /*has_bias=*/true),
        down_(scope, "ffn.down", scope.config.ffn, 1) {}

  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                   ResultUse use) const override {
    const LinearParameters &up = up_.parameters(), &down = down_.parameters();
    return pass.parallel.RowParallel(
        pass.tape, pass.shard, down.bias, residual,
        [&](const Variable& down_bias, const Variable& addend) {
          return pass.parallel.ColumnParallel(
              pass.tape, pass.shard, x,
              [&](const Variable& all, const std::function<void()>& dx_done) {
                return GeluMlp(pass.tape, all, up.weight, up.bias, down.weight, down_bias, addend,
                               dx_done, use);
              });
        });
  }

 private:
  ColumnParallelLinear up_;
  RowParallelLinear down_;
};

// (silu(gate) * up) down^T, where [gate, up] = x gate_up^T.
class SwiGluFeedForward : public FeedForward {
 public:
  explicit SwiGluFeedForward(const LayerScope& scope)
      : gate_up_(scope, "ffn.gate_up", {scope.config.ffn, scope.config.ffn}, 1, /*has_bias=*/false),
        down_(scope, "ffn.down", scope.config.ffn, 1) {}

  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                   ResultUse use) const override {
    return down_.Forward(pass, SwiGlu(pass.tape, gate_up_.Forward(pass, x)), residual, use);
  }

 private:
  ColumnParallelLinear gate_up_;
  RowParallelLinear down_;
};

// x + dropout(branch). branch(residual) computes the branch plus `residual`, unless that is
// undefined: without dropout the branch's last GEMM adds x itself.
Variable AddBranch(const ForwardPass& pass, const Variable& x, int64_t dropout_site,
                   const std::function<Variable(const Variable& residual)>& branch) {
  const DropoutSite dropout = pass.DropoutAt(dropout_site);
  if (!dropout.active()) return branch(x);
  return Dropout(pass.tape, branch(Variable()), dropout, x);
}

}  // namespace

SelfAttention::SelfAttention(const LayerScope& scope, int64_t layer, Rotation rotation)
    : layer_(layer),
      head_dim_(scope.config.head_dim),
      rotates_(rotation == Rotation::kRope),
      heads_(scope.parallel.LocalCount(scope.config.heads)),
      kv_heads_(scope.parallel.LocalCount(scope.config.kv_heads)),
      qkv_(scope, "attention.qkv",
           {scope.config.heads, scope.config.kv_heads, scope.config.kv_heads}, head_dim_,
           scope.config.has_biases() || scope.config.qkv_bias),
      norm_eps_(scope.config.norm_eps),
      out_(scope, "attention.out", scope.config.heads, head_dim_) {
  if (scope.config.attention_sinks) {
    const ParameterSharding by_heads = scope.parallel.Sharded(/*axis=*/0, {scope.config.heads}, 1);
    scope.Add("attention.sinks", {scope.config.heads}, 0, 0, false, by_heads, &sinks_);
  }
  if (!scope.config.qk_norm) return;
  // A rank's heads give a part of the gradient.
  const ParameterSharding replicated = scope.parallel.Replicated();
  scope.Add("attention.q_norm.weight", {head_dim_}, 1, 0, false, replicated, &query_norm_);
  scope.Add("attention.k_norm.weight", {head_dim_}, 1, 0, false, replicated, &key_norm_);
}

Variable SelfAttention::Forward(const ForwardPass& pass, const Normalization& norm,
                                const Variable& x, const Variable& residual) const {
  const bool in_groups = pass.head_chunk > 0 && pass.head_chunk < kv_heads_;
  const Variable out =
      in_groups ? AttendInGroups(pass, norm, x) : Attend(pass, Project(pass, norm, x));
  return ProjectOut(pass, out, residual);
}

Variable SelfAttention::Project(const ForwardPass& pass, const Normalization& norm,
                                const Variable& x) const {
  return Heads(pass, qkv_.Forward(pass, norm.Forward(pass, x)), {});
}

Variable SelfAttention::Attend(const ForwardPass& pass, const Variable& qkv) const {
  return pass.attend(pass, layer_, qkv, sinks_, {});
}

Variable SelfAttention::ProjectOut(const ForwardPass& pass, const Variable& out,
                                   const Variable& residual) const {
  const Shape& shape = out.shape();
  return out_.Forward(pass, Reshape(pass.tape, out, {shape[0], shape[1], shape[2] * head_dim_}),
                      residual);
}

// Where tokens go through the projections in chunks, these normalize them, too, for every group
// again; so that of all tokens nothing of the width is there but x and its gradient.
Variable SelfAttention::AttendInGroups(const ForwardPass& pass, const Normalization& norm,
                                       const Variable& x) const {
  BURST_CHECK(pass.parallel.ranks() == 1 && kv_heads_ % pass.head_chunk == 0);
  const int64_t count = kv_heads_ / pass.head_chunk;
  const bool in_chunks = pass.ffn_chunk > 0;
  std::shared_ptr<KeptAttention> kept = pass.kept_attention;
  if (kept == nullptr && pass.tape.recording()) kept = std::make_shared<KeptAttention>();
  std::vector<TapeFunction> groups;
  for (int64_t i = 0; i < count; ++i) {
    groups.push_back([this, pass, kept, norm = in_chunks ? &norm : nullptr,
                      group = HeadGroup{i, count}](Tape& tape, const Variable& x) {
      return AttendGroup(pass.On(tape, kept), norm, x, group);
    });
  }
  const Variable out = RecomputeInParts(
      pass.tape, in_chunks ? x : norm.Forward(pass, x), std::move(groups), /*axis=*/2,
      {x.shape()[0], x.shape()[1], heads_, head_dim_}, kept == nullptr ? Tensor() : kept->out);
  if (kept != nullptr) kept->out = out.value();
  return out;
}

Variable SelfAttention::AttendGroup(const ForwardPass& pass, const Normalization* norm,
                                    const Variable& x, const HeadGroup& group) const {
  const int64_t heads = heads_ / group.count, kv_heads = kv_heads_ / group.count, i = group.index;
  const int64_t d = head_dim_, keys = heads_ * d, values = keys + kv_heads_ * d;
  const std::vector<RowRange> rows = {{i * heads * d, heads * d},
                                      {keys + i * kv_heads * d, kv_heads * d},
                                      {values + i * kv_heads * d, kv_heads * d}};
  const LinearParameters& all = qkv_.parameters();
  const Variable weight = SelectRows(pass.tape, all.weight, rows);
  const Variable bias = all.bias.defined() ? SelectRows(pass.tape, all.bias, rows) : Variable();
  const Variable sinks =
      sinks_.defined() ? SelectRows(pass.tape, sinks_, {{i * heads, heads}}) : Variable();
  const auto attend = [&](const Variable& projected) {
    return pass.attend(pass, layer_, Heads(pass, projected, group), sinks, group);
  };
  if (norm == nullptr) return attend(Linear(pass.tape, x, weight, bias));
  const auto project = [pass, norm, weight, bias](Tape& tape, const Variable& x) {
    return Linear(tape, norm->Forward(pass.On(tape, nullptr), x), weight, bias);
  };
  return attend(RecomputeInChunks(pass.tape, x, pass.ffn_chunk, project, ResultUse::kRead,
                                  weight.shape()[0]));
}

Variable SelfAttention::Heads(const ForwardPass& pass, const Variable& projected,
                              const HeadGroup& group) const {
  const Shape& shape = projected.shape();
  const int64_t heads = heads_ / group.count, kv_heads = kv_heads_ / group.count;
  Variable qkv =
      Reshape(pass.tape, projected, {shape[0], shape[1], shape[2] / head_dim_, head_dim_});
  if (query_norm_.defined()) {
    qkv = RmsNormHeads(pass.tape, qkv, {query_norm_, heads}, {key_norm_, kv_heads}, norm_eps_);
  }
  return rotates_ ? Rope(pass.tape, qkv, pass.rope, heads + kv_heads) : qkv;
}

Block::Block(const LayerScope& scope, int64_t layer) : layer_(layer) {
  scope.config.family == Family::kLlama ? MakeLlama(scope) : MakeGpt2(scope);
}

// Radford et al., 2019.
void Block::MakeGpt2(const LayerScope& scope) {
  const ParameterSharding replicated = scope.parallel.ReplicatedInLayers();
  attention_norm_ = std::make_unique<LayerNormalization>(scope, "attention_norm", replicated);
  attention_ = std::make_unique<SelfAttention>(scope, layer_, SelfAttention::Rotation::kNone);
  ffn_norm_ = std::make_unique<LayerNormalization>(scope, "ffn_norm", replicated);
  ffn_ = std::make_unique<GeluFeedForward>(scope);
}

// Touvron et al., arXiv 2302.13971.
void Block::MakeLlama(const LayerScope& scope) {
  const ParameterSharding replicated = scope.parallel.ReplicatedInLayers();
  attention_norm_ = std::make_unique<RmsNormalization>(scope, "attention_norm", replicated);
  attention_ = std::make_unique<SelfAttention>(scope, layer_, SelfAttention::Rotation::kRope);
  ffn_norm_ = std::make_unique<RmsNormalization>(scope, "ffn_norm", replicated);
  ffn_ = std::make_unique<SwiGluFeedForward>(scope);
}

Variable Block::FeedForwardBranch(const ForwardPass& pass, const Variable& x,
                                  const Variable& residual) const {
  const bool adds = residual.defined();  // it is x then, and the result that of the layer
  const ResultUse use = adds ? pass.tape.result_use() : ResultUse::kRead;
  const auto branch = [this, pass, adds](Tape& tape, const Variable& x, ResultUse use) {
    const ForwardPass on = pass.On(tape, /*kept=*/nullptr);
    return ffn_->Forward(on, ffn_norm_->Forward(on, x), adds ? x : Variable(), use);
  };
  if (pass.ffn_chunk == 0) return branch(pass.tape, x, use);
  return RecomputeInChunks(
      pass.tape, x, pass.ffn_chunk,
      [branch](Tape& tape, const Variable& x) { return branch(tape, x, tape.result_use()); }, use);
}

Variable Block::AddFeedForward(const ForwardPass& pass, const Variable& h) const {
  ReachOp(static_cast<int>(layer_), "feed-forward");
  return AddBranch(pass, h, 2 + 2 * layer_,
                   [&](const Variable& residual) { return FeedForwardBranch(pass, h, residual); });
}

// The same steps, those before attention and those behind it chunk by chunk.
Variable Block::ForwardInChunks(const ForwardPass& pass, const Variable& x) const {
  const DType dtype = x.value().dtype();
  const DeviceType device = x.value().device();
  ReachOp(static_cast<int>(layer_), "projections", /*on_device=*/true);
  const Variable qkv =
      pass.InChunks({x}, attention_->ProjectedShape(), dtype, device,
                    [&](const ForwardPass& of_chunk, const std::vector<Variable>& inputs) {
                      return attention_->Project(of_chunk, *attention_norm_, inputs[0]);
                    });
  const Variable out = attention_->Attend(pass, qkv);
  return pass.InChunks(
      {x, out}, {x.shape().back()}, dtype, device,
      [&](const ForwardPass& of_chunk, const std::vector<Variable>& inputs) {
        const Variable h =
            AddBranch(of_chunk, inputs[0], 1 + 2 * layer_, [&](const Variable& residual) {
              return attention_->ProjectOut(of_chunk, inputs[1], residual);
            });
        return AddFeedForward(of_chunk, h);
      },
      pass.tape.result_use());
}

Variable Block::Forward(const ForwardPass& pass, const Variable& x) const {
  if (pass.chunks != nullptr) return ForwardInChunks(pass, x);
  const int layer = static_cast<int>(layer_);
  ReachOp(layer, "projections", /*on_device=*/true);
  const Variable h = AddBranch(pass, x, 1 + 2 * layer_, [&](const Variable& residual) {
    return attention_->Forward(pass, *attention_norm_, x, residual);
  });
  return AddFeedForward(pass, h);
}

}  // namespace burst
