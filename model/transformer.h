// A decoder-only Transformer of the Llama or the GPT-2 family, as one rank of several runs it: on
// its tokens of every sequence. Only attention communicates; with tensor parallelism, the layers
// do.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/block.h"
#include "model/config.h"
#include "model/execution/layer_runner.h"
#include "model/execution/parameter_use.h"
#include "model/execution/plan.h"
#include "model/kv_cache.h"
#include "model/layers.h"
#include "model/ops/ops.h"
#include "model/parameters.h"
#include "model/pipeline_part.h"
#include "model/tensor_parallel.h"

namespace burst {

// This rank's part of a batch: its `length` tokens of every sequence, in the order of TokenShard,
// on the model's device.
struct SequenceBatch {
  Tensor tokens;     // [batch, length] int32
  Tensor positions;  // [batch, length] int32: index within the token's document
  Tensor targets;  // [batch, length] int32: the next token; -1: no loss here. Null when not needed
  LayerSchedules schedules;

  SequenceBatch To(DeviceType device) const;
};

class Transformer {
 public:
  // Parameters are drawn from `seed`, the same for every device; without one they are zeros, to be
  // filled. dtype as for ParameterList::Allocate. InvalidArgument for a config that does not
  // Validate or whose vocab (gpt2: context) is 0, or that `parallel` cannot shard. With `parallel`,
  // this is one rank's shard of the model; attention and batches must be of a tensor-parallel
  // strategy. With stages 2 and 3 of `sharding`, set_parameter_use comes before the first pass.
  // With `part`, this is one stage of a pipeline; there are at least as many layers as runs of
  // them. Tied embeddings are on the first and, as a copy (Parameter::copy), on the last stage.
  static absl::StatusOr<std::unique_ptr<Transformer>> Create(const ModelConfig& config, DType dtype,
                                                             std::optional<uint64_t> seed,
                                                             DeviceType device = DeviceType::kCpu,
                                                             const TensorParallel& parallel = {},
                                                             const StateSharding& sharding = {},
                                                             const PipelinePart& part = {});

  // The whole parameters of such a model, without memory; vocab and context as for Create.
  static absl::StatusOr<std::vector<Parameter>> ParametersOf(const ModelConfig& config);
  // The number of all their elements.
  static absl::StatusOr<int64_t> CountParameters(const ModelConfig& config);

  const ModelConfig& config() const { return config_; }  // WithDefaults
  DeviceType device() const { return parameters_.device(); }
  DType dtype() const { return parameters_.dtype(); }  // the dtype of activations
  ParameterList& parameters() { return parameters_; }
  const ParameterList& parameters() const { return parameters_; }

  // How passes run from here on. Checked: `plan` must fit the model (execution/plan.h).
  void SetExecution(const ExecutionPlan& plan);
  const ExecutionPlan& execution() const { return runner_.plan(); }
  // Memory of the host that offloaded activations have taken.
  int64_t offload_bytes() const { return runner_.offload_bytes(); }

  // Tells `use` of every use of the parameters; it must outlive the passes. Null: nobody is told.
  void set_parameter_use(ParameterUse* use) { uses_.set_use(use); }

  // The sum of LinearCrossEntropy over this rank's targets; a scalar. With terms.scale = 1 /
  // (targets of the whole global batch), the sum over ranks and micro-batches is the mean loss, and
  // the summed gradients are its gradients. The softcap of `terms` is the model's. Logits exist for
  // one chunk of tokens at a time.
  Variable Loss(Tape& tape, SequenceParallelAttention& attention, const SequenceBatch& batch,
                const LossTerms& terms, const DropoutKey& dropout,
                const GradientsReady& ready = nullptr) const;

  // Runs one chunk of a pipeline stage: its layers, and what the model has before or after them.
  // input: the stream after the run of layers before, of StreamShape; undefined for the model's
  // first run. Returns the stream after the chunk, or after the model's last run Loss. Not with an
  // exact plan, nor with offloaded activations. The other passes are for models that are whole.
  Variable ForwardChunk(Tape& tape, SequenceParallelAttention& attention,
                        const SequenceBatch& batch, int chunk, const Variable& input,
                        const LossTerms& terms, const DropoutKey& dropout) const;
  // Between layers on this rank: [batch, tokens, width].
  Shape StreamShape(const SequenceBatch& batch) const;

  // Logits [batch, length, vocab] of all tokens; for tests and evaluation of short inputs. These
  // and the two below are for models whose values are whole (not of stage 3).
  Variable Logits(Tape& tape, SequenceParallelAttention& attention,
                  const SequenceBatch& batch) const;

  // The score of a target: -log p(target) in nats, and whether no token is likelier.
  struct TargetScore {
    double loss = 0;
    bool likeliest = false;
  };
  // Scores this rank's targets that are not -1, in order of (sequence, token). Collective, no
  // gradient. Logits exist for one chunk of tokens at a time, and are copied to the host.
  absl::StatusOr<std::vector<TargetScore>> ScoreTargets(SequenceParallelAttention& attention,
                                                        const SequenceBatch& batch) const;

  // Prefill of a prompt over all ranks: the logits [batch, vocab] of the sequence's last token on
  // the rank that has it, null on the others. Collective, no gradient. `cache`, unless null: is
  // empty, and shared by these ranks; every rank keeps the keys and values of its tokens there.
  absl::StatusOr<Tensor> NextTokenLogits(SequenceParallelAttention& attention,
                                         const SequenceBatch& batch,
                                         KvCache* cache = nullptr) const;

  // Appends tokens [batch, n] (int32, n >= 1, below the vocab; on any device) to the cache and
  // returns the logits of the last one, [batch, vocab]. No gradient. Collective for ranks that
  // share the cache: each has the whole model and is given the same tokens; all return the same.
  // OutOfRange, with the cache as it was, when a gpt2 model would grow past its context. It is
  // also the error where a text becomes long (RopeScaling::IsLong): the keys in the cache have the
  // angles of a short one. A failed transfer gives the communicator's error.
  absl::StatusOr<Tensor> Decode(KvCache& cache, const Tensor& tokens) const;

  // FLOPs (2 per multiply-add) of a forward and backward pass per token: 6 x (parameters of GEMMs)
  // + 12 layers (channels of all heads) seqlen. The second number has half of the attention term.
  struct FlopsPerToken {
    double full = 0;    // 6N + 12 L d S
    double causal = 0;  // 6N + 6 L d S
  };
  FlopsPerToken TrainingFlopsPerToken(int64_t seqlen) const;

 private:
  // Declares the parameters, without memory.
  explicit Transformer(const ModelConfig& config, const TensorParallel& parallel = {},
                       const PipelinePart& part = {});

  ForwardPass MakePass(Tape& tape, SequenceParallelAttention& attention, const SequenceBatch& batch,
                       const DropoutKey& dropout, KvCache* cache) const;

  // Returns the numbers of the parameters that passes read in e4m3 with one scale.
  std::vector<int> Float8Weights(const ExecutionPlan& plan) const;

  // The residual stream after the final normalization, [batch, length, width].
  Variable Hidden(const ForwardPass& pass, const SequenceBatch& batch, bool fills_cache,
                  const GradientsReady& ready) const;
  Variable Hidden(Tape& tape, SequenceParallelAttention& attention, const SequenceBatch& batch,
                  const DropoutKey& dropout, const GradientsReady& ready = nullptr,
                  KvCache* cache = nullptr) const;

  // Makes RoPE's tables of a pass, over a text of `length` tokens on all ranks.
  void SetRope(const Tensor& positions, int64_t length, PassContext* context) const;
  Variable Embed(const ForwardPass& pass, const Tensor& tokens, const Tensor& positions) const;
  Variable FinalNorm(const ForwardPass& pass, const Variable& x) const;
  // The chunks of an exact pass.
  std::shared_ptr<const ChunkOptions> Chunks(const SequenceBatch& batch) const;
  // Terms with the model's softcap.
  LossTerms OwnTerms(const LossTerms& terms) const {
    return {terms.scale, terms.z, config_.logits_softcap};
  }
  // Logits of normalized rows x: [..., vocab].
  Variable HeadLogits(Tape& tape, const Variable& x) const;
  Variable LossInChunks(Tape& tape, const Variable& x, const Tensor& targets,
                        const LossTerms& terms,
                        const std::shared_ptr<const ChunkOptions>& chunks) const;

  const Variable& head() const { return config_.tied_embeddings ? token_embedding_ : head_; }

  const ModelConfig config_;
  const TensorParallel parallel_;
  const PipelinePart part_;
  // llama: by RopeScaling::IsLong, then by ModelConfig::IsFull.
  std::array<std::array<RopeAngles, 2>, 2> rope_angles_;
  ParameterList parameters_;
  Variable token_embedding_;     // [vocab, width]
  Variable position_embedding_;  // [context, width], gpt2
  std::vector<Block> blocks_;
  std::vector<int> first_parameter_;  // by block, then of what follows
  UnitUses uses_;
  LayerRunner runner_;
  std::unique_ptr<Normalization> final_norm_;
  Variable head_;  // [vocab, width], unless tied
};

}  // namespace burst
