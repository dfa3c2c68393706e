// Layers that own parameters: normalization and the two linear layers of tensor parallelism.
//
// A layer declares its parameters when it is constructed; ParameterList::Allocate gives them
// memory. Until then a layer must not move. Layers and TensorParallel decide which rank has which
// shard of a parameter, and what the ranks exchange around a GEMM. On one rank nothing is
// exchanged.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "burst/attention/sequence_parallel_attention.h"
#include "burst/autograd/chunks.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/ops/ops.h"
#include "model/parameters.h"
#include "model/tensor_parallel.h"

namespace burst {

struct ForwardPass;

// The schedules of the layers' attention: of layers with the run's window, and of the model's
// full_layers. Both have one shard.
struct LayerSchedules {
  LayerSchedules() = default;
  // All layers have one schedule. The conversion is implicit.
  LayerSchedules(const std::shared_ptr<const AttentionSchedule>& all) : windowed(all), full(all) {}

  // Returns the schedule of full_layers, or of the other layers.
  const std::shared_ptr<const AttentionSchedule>& Of(bool is_full) const {
    return is_full ? full : windowed;
  }
  const TokenShard& shard() const { return windowed->shard(); }

  std::shared_ptr<const AttentionSchedule> windowed, full;
};

// Makes the schedules of a sequence. `mask` has the run's window. A full layer costs more, so
// Layout::kBalanced spreads the tokens by its mask.
absl::StatusOr<LayerSchedules> MakeLayerSchedules(const ModelConfig& config,
                                                  const SequenceParallelAttention& attention,
                                                  int64_t seqlen, const Mask& mask);

// Computes a layer's attention. qkv: [batch, length, heads + 2 kv_heads, head_dim]; result: [batch,
// length, heads, head_dim]. Both have all heads, or those of `group`. sinks: [heads], or undefined.
using AttendFunction =
    std::function<Variable(const ForwardPass& pass, int64_t layer, const Variable& qkv,
                           const Variable& sinks, const HeadGroup& group)>;

// A place where dropout applies: the embedding, or one of the two branches of a layer.
constexpr int64_t kEmbeddingSite = 0;
constexpr int64_t AttentionSite(int64_t layer) { return 1 + 2 * layer; }
constexpr int64_t FeedForwardSite(int64_t layer) { return 2 + 2 * layer; }

// The state that all layers of a forward pass share. A pass over a chunk of the tokens has its own.
struct PassContext {
  // How the ranks share the model, and which tokens each has. shard: null on one rank's decoding.
  const TensorParallel* parallel = nullptr;
  std::shared_ptr<const TokenShard> shard = nullptr;
  AttendFunction attend = nullptr;
  // RoPE's tables, by ModelConfig::IsFull of the layer. Null: a gpt2 model.
  std::array<std::shared_ptr<const RopeTable>, 2> rope = {};
  LinearPrecision linear_precision = LinearPrecision::kTensors;  // of the layers' projections
  double dropout_rate = 0;
  DropoutKey dropout = {};
  Tensor global_positions = {};  // [length] int32, which dropout draws by; null: no dropout
  // The chunks of an exact pass, which takes its tokens in chunks everywhere but in attention.
  // Null: all tokens at once.
  std::shared_ptr<const ChunkOptions> chunks = nullptr;
};

// One forward pass on one tape. A recomputation runs the same pass on a tape of its own.
struct ForwardPass {
  Tape& tape;
  std::shared_ptr<const PassContext> context;
  // The values that attention keeps for a second run of the layer, which does not attend again.
  // Null: the layer runs once, or attends twice.
  std::shared_ptr<KeptAttention> kept_attention = nullptr;

  const PassContext* operator->() const { return context.get(); }

  // Returns this pass on another tape.
  ForwardPass On(Tape& other, std::shared_ptr<KeptAttention> kept = nullptr) const {
    return {other, context, std::move(kept)};
  }
  // Returns this pass for one of its chunks.
  ForwardPass Of(const TokenChunk& chunk, Tape& other) const;
  // Runs `step` on each chunk: it takes and returns the chunk's rows and tokens (chunks.h).
  using ChunkStep =
      std::function<Variable(const ForwardPass& of_chunk, const std::vector<Variable>& inputs)>;
  Variable InChunks(const std::vector<Variable>& inputs, const Shape& trailing, DType dtype,
                    DeviceType device, const ChunkStep& step,
                    ResultUse use = ResultUse::kRead) const;
  DropoutSite DropoutAt(int64_t site) const {
    return {context->dropout_rate, context->dropout, site, context->global_positions};
  }
};

// Where a layer declares its parameters.
struct LayerScope {
  const ModelConfig& config;  // WithDefaults
  const TensorParallel& parallel;
  ParameterList* parameters;
  std::string prefix;  // of the parameters' names: "layers.0.", or empty

  // Declares "<prefix><name>".
  void Add(const std::string& name, const Shape& shape, double init_mean, double init_std,
           bool decay, const ParameterSharding& sharding, Variable* variable) const;
};

// Normalization over the channels of x: [batch, length, width], like the result. Its parameters,
// [width] each, are replicated: `sharding` is TensorParallel::ReplicatedInLayers in a layer, else
// Replicated.
class Normalization {
 public:
  virtual ~Normalization() = default;
  // `reader` is the precision of the linear layers that read the result.
  virtual Variable Forward(const ForwardPass& pass, const Variable& x,
                           LinearPrecision reader = LinearPrecision::kTensors) const = 0;
};

// Declares a normalization of the model's family: RMSNorm, or LayerNorm for gpt2.
std::unique_ptr<Normalization> MakeNormalization(const LayerScope& scope, const std::string& name,
                                                 const ParameterSharding& sharding);

// The parameters of a linear layer.
struct LinearParameters {
  Variable weight;  // [out, in]
  Variable bias;    // [out]; undefined without one
};

// y = x W^T + b, column-parallel: a rank computes some of the output channels for all tokens.
class ColumnParallelLinear {
 public:
  // The output is groups[0] + groups[1] + ... heads (or channels, with `unit` 1) of `unit` channels
  // each. Each group is sharded equally over the ranks; where it has fewer heads than there are
  // ranks, neighboring ranks replicate one. The bias is sharded as the rows of the weight are.
  ColumnParallelLinear(const LayerScope& scope, const std::string& name,
                       const std::vector<int64_t>& groups, int64_t unit, bool has_bias);

  // x: [batch, length, width], the residual stream after normalization.
  // Result: [batch, all tokens, this rank's channels].
  Variable Forward(const ForwardPass& pass, const Variable& x) const;

  // For an op that takes the layer's GEMM along with other work.
  const LinearParameters& parameters() const { return parameters_; }

 private:
  LinearParameters parameters_;
};

// y = residual + x W^T + b, row-parallel: a rank has some of the input channels, and its GEMM gives
// a partial result, which the ranks add up. The layer ends a branch, so its initial weights are
// smaller by sqrt(2 layers). The variance of the residual stream then does not grow with the number
// of layers (Radford et al., 2019).
class RowParallelLinear {
 public:
  // The input is `count` heads (or channels, with `unit` 1) of `unit` channels each, sharded
  // equally over the ranks; the output has config.width channels. The bias is replicated.
  RowParallelLinear(const LayerScope& scope, const std::string& name, int64_t count, int64_t unit,
                    bool has_bias);

  // x: [batch, all tokens, this rank's channels].
  // residual (may be undefined) and result: [batch, length, width].
  Variable Forward(const ForwardPass& pass, const Variable& x, const Variable& residual,
                   ResultUse use = ResultUse::kRead) const;

  const LinearParameters& parameters() const { return parameters_; }

 private:
  LinearParameters parameters_;
};

}  // namespace burst
