#include "model/block.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "model/ops/gelu_mlp.h"
#include "model/ops/layernorm.h"
#include "model/ops/linear.h"
#include "model/ops/rmsnorm.h"
#include "model/ops/swiglu.h"

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

}  // namespace

void Norm::Declare(const ModelConfig& config, const std::string& name,
                   const ParameterSharing& sharing, ParameterList* parameters) {
  parameters->Add(absl::StrCat(name, ".weight"), {config.width}, 1, 0, false, &weight, sharing);
  if (config.family == Family::kGpt2) {
    parameters->Add(absl::StrCat(name, ".bias"), {config.width}, 0, 0, false, &bias, sharing);
  }
}

Variable Norm::Forward(const ForwardPass& pass, const ModelConfig& config,
                       const Variable& x) const {
  if (config.family == Family::kLlama) return RmsNorm(pass.tape, x, weight, config.norm_eps);
  return LayerNorm(pass.tape, x, weight, bias, config.norm_eps);
}

void Dense::Declare(const ModelConfig& config, const std::string& name, int64_t out, int64_t in,
                    double init_std, const TensorParallel& parallel,
                    const ParameterSharing& sharing, ParameterList* parameters) {
  parameters->Add(absl::StrCat(name, ".weight"), {out, in}, 0, init_std, true, &weight, sharing);
  if (config.family == Family::kGpt2) {
    parameters->Add(absl::StrCat(name, ".bias"), {out}, 0, 0, false, &bias,
                    sharing.axis == 0 ? sharing : parallel.Whole());
  }
}

Variable Dense::Forward(const ForwardPass& pass, const Variable& x) const {
  return Linear(pass.tape, x, weight, bias);
}

Variable Dense::RowBias(const ForwardPass& pass) const {
  return pass.parallel->rank() == 0 ? bias : Variable();
}

void Block::Declare(const ModelConfig& config, int64_t layer, const TensorParallel& parallel,
                    ParameterList* parameters) {
  config_ = config;
  layer_ = layer;
  rotated_heads_ = parallel.PartOf(config.heads) + parallel.PartOf(config.kv_heads);
  const std::string prefix = absl::StrCat("layers.", layer, ".");
  const int64_t width = config.width, kv_width = config.kv_heads * config.head_dim();
  // Projections into the residual stream start smaller, so that its variance does not grow with the
  // number of layers (Radford et al., 2019).
  const double residual_std = config.init_std / std::sqrt(2.0 * config.layers);
  const auto declare = [&](Dense& dense, const char* name, int64_t out, int64_t in, double init_std,
                           const ParameterSharing& sharing) {
    dense.Declare(config, prefix + name, out, in, init_std, parallel, sharing, parameters);
  };
  const int64_t heads = config.heads, kv_heads = config.kv_heads, head_dim = config.head_dim();
  const bool llama = config.family == Family::kLlama;
  std::vector<int64_t> hidden = {config.ffn};
  if (llama) hidden.push_back(config.ffn);  // the gate and what it gates
  attention_norm_.Declare(config, prefix + "attention_norm", parallel.WholeInLayers(), parameters);
  declare(qkv_, "attention.qkv", width + 2 * kv_width, width, config.init_std,
          parallel.Split(0, {heads, kv_heads, kv_heads}, head_dim));
  declare(out_, "attention.out", width, width, residual_std, parallel.Split(1, {heads}, head_dim));
  ffn_norm_.Declare(config, prefix + "ffn_norm", parallel.WholeInLayers(), parameters);
  declare(up_, llama ? "ffn.gate_up" : "ffn.up", (llama ? 2 : 1) * config.ffn, width,
          config.init_std, parallel.Split(0, hidden, 1));
  declare(down_, "ffn.down", width, config.ffn, residual_std, parallel.Split(1, {config.ffn}, 1));
}

Variable Block::Forward(const ForwardPass& pass, const Variable& x) const {
  const Variable attended = Attention(pass, attention_norm_.Forward(pass, config_, x));
  const Variable h = AddBranch(pass, x, out_, attended, 1 + 2 * layer_);
  return AddFeedForward(pass, h, ffn_norm_.Forward(pass, config_, h));
}

Variable Block::Attention(const ForwardPass& pass, const Variable& x) const {
  const Variable projected = Project(pass, qkv_, x);  // [batch, length, channels of all heads]
  const Shape& shape = projected.shape();
  const int64_t head_dim = config_.head_dim();
  Variable qkv = Reshape(pass.tape, projected, {shape[0], shape[1], shape[2] / head_dim, head_dim});
  if (config_.family == Family::kLlama) qkv = Rope(pass.tape, qkv, pass.rope, rotated_heads_);
  const Variable out = pass.attend(pass, layer_, qkv);
  return Reshape(pass.tape, out, {shape[0], shape[1], out.shape()[2] * head_dim});
}

// dense(x); of all tokens this rank's channels, where ranks share the model.
Variable Block::Project(const ForwardPass& pass, const Dense& dense, const Variable& x) const {
  if (pass.parallel == nullptr) return dense.Forward(pass, x);
  const auto columns = pass.parallel->BeginColumns(pass.tape, pass.shard, x);
  const Variable y = Linear(pass.tape, columns.x, dense.weight, dense.bias, {}, columns.dx_done);
  pass.parallel->EndColumns(pass.tape, pass.shard, x, columns);
  return y;
}

// h + dropout(ffn(x))
Variable Block::AddFeedForward(const ForwardPass& pass, const Variable& h,
                               const Variable& x) const {
  const int64_t site = 2 + 2 * layer_;
  if (config_.family == Family::kLlama) {
    return AddBranch(pass, h, down_, SwiGlu(pass.tape, Project(pass, up_, x)), site);
  }
  const DropoutSite dropout = DropoutAt(pass, config_, site);
  const Variable residual = dropout.active() ? Variable() : h;
  Variable y;
  if (pass.parallel == nullptr) {
    y = GeluMlp(pass.tape, x, up_.weight, up_.bias, down_.weight, down_.bias, residual);
  } else {
    const auto columns = pass.parallel->BeginColumns(pass.tape, pass.shard, x);
    const Variable partial = GeluMlp(pass.tape, columns.x, up_.weight, up_.bias, down_.weight,
                                     down_.RowBias(pass), {}, columns.dx_done);
    pass.parallel->EndColumns(pass.tape, pass.shard, x, columns);
    y = pass.parallel->SumRows(pass.tape, pass.shard, partial, residual);
  }
  return dropout.active() ? Dropout(pass.tape, y, dropout, h) : y;
}

// x + dropout(projection(branch)). Without dropout the product itself adds x.
Variable Block::AddBranch(const ForwardPass& pass, const Variable& x, const Dense& projection,
                          const Variable& branch, int64_t dropout_site) const {
  const DropoutSite site = DropoutAt(pass, config_, dropout_site);
  const Variable residual = site.active() ? Variable() : x;
  Variable y;
  if (pass.parallel == nullptr) {
    y = Linear(pass.tape, branch, projection.weight, projection.bias, residual);
  } else {
    const Variable partial = Linear(pass.tape, branch, projection.weight, projection.RowBias(pass));
    y = pass.parallel->SumRows(pass.tape, pass.shard, partial, residual);
  }
  return site.active() ? Dropout(pass.tape, y, site, x) : y;
}

DropoutSite DropoutAt(const ForwardPass& pass, const ModelConfig& config, int64_t site) {
  DropoutSite result;
  result.rate = config.dropout;
  result.key = pass.dropout;
  result.site = site;
  result.positions = pass.global_positions;
  return result;
}

}  // namespace burst
