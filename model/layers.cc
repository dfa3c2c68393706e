#include "model/layers.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "model/ops/ops.h"

namespace burst {

absl::StatusOr<LayerSchedules> MakeLayerSchedules(const ModelConfig& config,
                                                  const SequenceParallelAttention& attention,
                                                  int64_t seqlen, const Mask& mask) {
  Sequences sequences(seqlen);
  const bool differ = !config.full_layers.empty() && mask.HasWindow();
  if (differ) sequences.spread_by = mask.WithoutWindow();
  const auto make =
      [&](const Mask& of) -> absl::StatusOr<std::shared_ptr<const AttentionSchedule>> {
    BURST_ASSIGN_OR_RETURN(AttentionSchedule made, attention.Schedule(sequences, of));
    return std::make_shared<const AttentionSchedule>(std::move(made));
  };
  BURST_ASSIGN_OR_RETURN(LayerSchedules schedules, make(mask));
  if (!differ) return schedules;
  BURST_ASSIGN_OR_RETURN(schedules.full, make(*sequences.spread_by));
  return schedules;
}

ForwardPass ForwardPass::Of(const TokenChunk& chunk, Tape& other) const {
  auto own = std::make_shared<PassContext>(*context);
  own->chunks = nullptr;
  const int64_t first = chunk.row * context->chunks->length + chunk.begin;
  const int64_t count = chunk.rows * chunk.length;
  for (auto& rope : own->rope) {
    if (rope == nullptr) continue;
    rope = std::make_shared<const RopeTable>(
        RopeTable{rope->cos.Slice(0, first, count), rope->sin.Slice(0, first, count)});
  }
  own->dropout.first_row += chunk.row;
  if (!own->global_positions.null()) {
    own->global_positions = own->global_positions.Slice(0, chunk.begin, chunk.length);
  }
  return {other, std::move(own)};
}

Variable ForwardPass::InChunks(const std::vector<Variable>& inputs, const Shape& trailing,
                               DType dtype, DeviceType device, const ChunkStep& step,
                               ResultUse use) const {
  return burst::InChunks(
      tape, inputs, *context->chunks, trailing, dtype, device,
      [this, &step](Tape& tape, const std::vector<Variable>& inputs, const TokenChunk& chunk) {
        return step(Of(chunk, tape), inputs);
      },
      use);
}

namespace {

void AddLinear(const LayerScope& scope, const std::string& name, int64_t out, int64_t in,
               double init_std, const ParameterSharding& weight_sharding,
               const ParameterSharding& bias_sharding, bool has_bias,
               LinearParameters* parameters) {
  scope.Add(name + ".weight", {out, in}, 0, init_std, true, weight_sharding, &parameters->weight);
  if (!has_bias) return;
  scope.Add(name + ".bias", {out}, 0, 0, false, bias_sharding, &parameters->bias);
}

}  // namespace

void LayerScope::Add(const std::string& name, const Shape& shape, double init_mean, double init_std,
                     bool decay, const ParameterSharding& sharding, Variable* variable) const {
  parameters->Add(absl::StrCat(prefix, name), shape, init_mean, init_std, decay, variable,
                  sharding);
}

namespace {

class RmsNormalization : public Normalization {
 public:
  RmsNormalization(const LayerScope& scope, const std::string& name,
                   const ParameterSharding& sharding)
      : eps_(scope.config.norm_eps), offset_(scope.config.unit_offset_norms ? 1 : 0) {
    scope.Add(name + ".weight", {scope.config.width}, 1 - offset_, 0, false, sharding, &weight_);
  }
  Variable Forward(const ForwardPass& pass, const Variable& x,
                   LinearPrecision reader) const override {
    return RmsNorm(pass.tape, x, weight_, eps_, reader, offset_);
  }

 private:
  const double eps_, offset_;
  Variable weight_;
};

class LayerNormalization : public Normalization {
 public:
  LayerNormalization(const LayerScope& scope, const std::string& name,
                     const ParameterSharding& sharding)
      : eps_(scope.config.norm_eps) {
    scope.Add(name + ".weight", {scope.config.width}, 1, 0, false, sharding, &weight_);
    scope.Add(name + ".bias", {scope.config.width}, 0, 0, false, sharding, &bias_);
  }
  Variable Forward(const ForwardPass& pass, const Variable& x,
                   LinearPrecision reader) const override {
    return LayerNorm(pass.tape, x, weight_, bias_, eps_, reader);
  }

 private:
  const double eps_;
  Variable weight_, bias_;
};

}  // namespace

std::unique_ptr<Normalization> MakeNormalization(const LayerScope& scope, const std::string& name,
                                                 const ParameterSharding& sharding) {
  if (scope.config.family == Family::kGpt2) {
    return std::make_unique<LayerNormalization>(scope, name, sharding);
  }
  return std::make_unique<RmsNormalization>(scope, name, sharding);
}

ColumnParallelLinear::ColumnParallelLinear(const LayerScope& scope, const std::string& name,
                                           const std::vector<int64_t>& groups, int64_t unit,
                                           bool has_bias) {
  int64_t out = 0;
  for (const int64_t count : groups) out += count * unit;
  const ParameterSharding rows = scope.parallel.Sharded(/*axis=*/0, groups, unit);
  AddLinear(scope, name, out, scope.config.width, scope.config.init_std, rows, rows, has_bias,
            &parameters_);
}

Variable ColumnParallelLinear::Forward(const ForwardPass& pass, const Variable& x) const {
  return pass->parallel->ColumnParallel(
      pass.tape, pass->shard, x, [&](const Variable& all, const std::function<void()>& dx_done) {
        return Linear(pass.tape, all, parameters_.weight, parameters_.bias, {}, dx_done,
                      ResultUse::kRead, pass->linear_precision);
      });
}

RowParallelLinear::RowParallelLinear(const LayerScope& scope, const std::string& name,
                                     int64_t count, int64_t unit, bool has_bias) {
  const double init_std = scope.config.init_std / std::sqrt(2.0 * scope.config.layers);
  AddLinear(scope, name, scope.config.width, count * unit, init_std,
            scope.parallel.Sharded(/*axis=*/1, {count}, unit), scope.parallel.Replicated(),
            has_bias, &parameters_);
}

Variable RowParallelLinear::Forward(const ForwardPass& pass, const Variable& x,
                                    const Variable& residual, ResultUse use) const {
  return pass->parallel->RowParallel(pass.tape, pass->shard, parameters_.bias, residual,
                                     [&](const Variable& bias, const Variable& addend) {
                                       return Linear(pass.tape, x, parameters_.weight, bias, addend,
                                                     /*dx_done=*/nullptr, use,
                                                     pass->linear_precision);
                                     });
}

}  // namespace burst
