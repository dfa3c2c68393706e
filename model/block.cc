#include "model/block.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "model/ops/gelu_mlp.h"
#include "model/ops/layernorm.h"
#include "model/ops/linear.h"
#include "model/ops/rmsnorm.h"
#include "model/ops/swiglu.h"

namespace burst {
namespace {

// [batch, length, channels] as [batch, length, channels / head_dim, head_dim].
Variable SplitHeads(Tape& tape, const Variable& x, int64_t head_dim) {
  const Shape shape = {x.value().dim(0), x.value().dim(1), x.value().dim(2) / head_dim, head_dim};
  const Variable y = tape.Output(x.value().View(shape), {x});
  if (tape.NeedsGrad({x})) {
    tape.Record("split_heads", {y}, [=] { x.AddGrad(y.grad().Contiguous().View(x.shape())); });
  }
  return y;
}

}  // namespace

void Norm::Declare(const ModelConfig& config, const std::string& name, ParameterList* parameters) {
  parameters->Add(absl::StrCat(name, ".weight"), {config.width}, 1, 0, false, &weight);
  if (config.family == Family::kGpt2) {
    parameters->Add(absl::StrCat(name, ".bias"), {config.width}, 0, 0, false, &bias);
  }
}

Variable Norm::Forward(const ForwardPass& pass, const ModelConfig& config,
                       const Variable& x) const {
  if (config.family == Family::kLlama) return RmsNorm(pass.tape, x, weight, config.norm_eps);
  return LayerNorm(pass.tape, x, weight, bias, config.norm_eps);
}

void Dense::Declare(const ModelConfig& config, const std::string& name, int64_t out, int64_t in,
                    double init_std, ParameterList* parameters) {
  parameters->Add(absl::StrCat(name, ".weight"), {out, in}, 0, init_std, true, &weight);
  if (config.family == Family::kGpt2) {
    parameters->Add(absl::StrCat(name, ".bias"), {out}, 0, 0, false, &bias);
  }
}

Variable Dense::Forward(const ForwardPass& pass, const Variable& x) const {
  return Linear(pass.tape, x, weight, bias);
}

void Block::Declare(const ModelConfig& config, int64_t layer, ParameterList* parameters) {
  config_ = config;
  layer_ = layer;
  const std::string prefix = absl::StrCat("layers.", layer, ".");
  const int64_t width = config.width, kv_width = config.kv_heads * config.head_dim();
  // Projections into the residual stream start smaller, so that its variance does not grow with the
  // number of layers (Radford et al., 2019).
  const double residual_std = config.init_std / std::sqrt(2.0 * config.layers);
  const auto declare = [&](Dense& dense, const char* name, int64_t out, int64_t in,
                           double init_std) {
    dense.Declare(config, prefix + name, out, in, init_std, parameters);
  };
  attention_norm_.Declare(config, prefix + "attention_norm", parameters);
  declare(qkv_, "attention.qkv", width + 2 * kv_width, width, config.init_std);
  declare(out_, "attention.out", width, width, residual_std);
  ffn_norm_.Declare(config, prefix + "ffn_norm", parameters);
  const bool llama = config.family == Family::kLlama;
  declare(up_, llama ? "ffn.gate_up" : "ffn.up", (llama ? 2 : 1) * config.ffn, width,
          config.init_std);
  declare(down_, "ffn.down", width, config.ffn, residual_std);
}

Variable Block::Forward(const ForwardPass& pass, const Variable& x) const {
  const Variable attended = Attention(pass, attention_norm_.Forward(pass, config_, x));
  const Variable h = AddBranch(pass, x, out_, attended, 1 + 2 * layer_);
  return AddFeedForward(pass, h, ffn_norm_.Forward(pass, config_, h));
}

Variable Block::Attention(const ForwardPass& pass, const Variable& x) const {
  Variable qkv = SplitHeads(pass.tape, qkv_.Forward(pass, x), config_.head_dim());
  if (config_.family == Family::kLlama) {
    qkv = Rope(pass.tape, qkv, pass.rope, config_.heads + config_.kv_heads);
  }
  return pass.attend(layer_, qkv);
}

// h + dropout(ffn(x))
Variable Block::AddFeedForward(const ForwardPass& pass, const Variable& h,
                               const Variable& x) const {
  const int64_t site = 2 + 2 * layer_;
  if (config_.family == Family::kLlama) {
    return AddBranch(pass, h, down_, SwiGlu(pass.tape, up_.Forward(pass, x)), site);
  }
  const DropoutSite dropout = DropoutAt(pass, config_, site);
  const Variable y = GeluMlp(pass.tape, x, up_.weight, up_.bias, down_.weight, down_.bias,
                             dropout.active() ? Variable() : h);
  return dropout.active() ? Dropout(pass.tape, y, dropout, h) : y;
}

// x + dropout(projection(branch)). Without dropout the product itself adds x.
Variable Block::AddBranch(const ForwardPass& pass, const Variable& x, const Dense& projection,
                          const Variable& branch, int64_t dropout_site) const {
  const DropoutSite site = DropoutAt(pass, config_, dropout_site);
  if (!site.active()) return Linear(pass.tape, branch, projection.weight, projection.bias, x);
  return Dropout(pass.tape, projection.Forward(pass, branch), site, x);
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
