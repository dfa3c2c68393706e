// A decoder-only Transformer of the Llama or the GPT-2 family, as one rank of several runs it: on
// its tokens of every sequence. Only attention communicates; with tensor parallelism, the layers
// do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/host_copies.h"
#include "burst/tensor/tensor.h"
#include "model/block.h"
#include "model/config.h"
#include "model/kv_cache.h"
#include "model/layers.h"
#include "model/offloaded_layer.h"
#include "model/ops/ops.h"
#include "model/parameter_use.h"
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
  std::shared_ptr<const RingSchedule> schedule;

  SequenceBatch To(DeviceType device) const;
};

// Called during a backward when the gradients of the parameters [first, last) of the list have all
// contributions of this backward, so that they can be summed over ranks while it continues. Every
// parameter is reported once.
using GradientsReady = std::function<void(int first, int last)>;

class Transformer {
 public:
  // Parameters are drawn from `seed`, the same for every device; without one they are zeros, to be
  // filled. dtype as for ParameterList::Allocate. InvalidArgument for a config that does not
  // Validate or whose vocab (gpt2: context) is 0, or that `parallel` cannot shard. With `parallel`,
  // this is one rank's shard of the model; attention and batches must be of a tensor-parallel
  // strategy. Of the stages 2 and 3 of `sharding`, set_parameter_use comes before the first pass.
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
  DType dtype() const { return parameters_.dtype(); }  // of activations
  ParameterList& parameters() { return parameters_; }
  const ParameterList& parameters() const { return parameters_; }

  // What the layers save for the backward; kNone unless set. Of every `every` layers the first one
  // recomputes, the others save all. segment > 1 (every is 1 then): of so many layers in a row only
  // the input of the first one is saved, until the backward computes the row again, now with what
  // `recompute` says.
  void set_recompute(Recompute recompute, int64_t every = 1, int64_t segment = 1) {
    BURST_CHECK(segment == 1 || (recompute != Recompute::kNone && every == 1));
    recompute_ = recompute;
    recompute_every_ = every;
    segment_ = static_cast<size_t>(segment);
  }
  // Feed-forwards, with their normalization, take so many tokens at a time and save nothing: the
  // backward computes them again (RecomputeInChunks). 0, unless set: all at once. Not with tensor
  // parallelism.
  void set_ffn_chunk(int64_t tokens);
  // Attention takes so many KV heads, with their query heads, at a time, from their projection on;
  // of a group nothing is saved but its result (RecomputeInParts). 0, unless set: all at once.
  // Divides the KV heads. Not with tensor parallelism, nor in a pass that fills a cache.
  void set_head_chunk(int64_t kv_heads);

  // All but attention takes so many tokens at a time: of a sequence, or so many whole sequences.
  // And every sum over tokens is exact: losses and gradients then have the same bits however these
  // chunks, which divide a rank's tokens, are spread over ranks; with an attention that has them,
  // too (ExactAttention). `tokens`: of a step, of all ranks. Gradients are complete in
  // parameters().exact_sums(). Not with tensor parallelism, nor set_head_chunk.
  void set_exact(int64_t chunk, int64_t tokens);

  // What recomputing layers keep, their input and attention's result, waits in the host's memory
  // for the backward. Of no effect on layers that save all. Unless set, it stays on the device.
  void set_offload(bool offload);
  // Memory of the host for that, for passes of so many tokens on this rank, whose attention has its
  // result for `attended` tokens and keeps it so many times; HostCopies says when.
  void ReserveOffload(int64_t tokens, int64_t attended, int results);
  int64_t offload_bytes() const { return copies_ == nullptr ? 0 : copies_->host_bytes(); }

  // Told of every use of the parameters; must outlive the passes. Null: nobody.
  void set_parameter_use(ParameterUse* use) { use_ = use; }

  // loss_scale * (sum over this rank's targets of -log p(target)); a scalar. With loss_scale = 1 /
  // (targets of the whole global batch), the sum over ranks and micro-batches is the mean loss, and
  // the summed gradients are its gradients. Logits exist for one chunk of tokens at a time.
  Variable Loss(Tape& tape, SequenceParallelAttention& attention, const SequenceBatch& batch,
                double loss_scale, const DropoutKey& dropout,
                const GradientsReady& ready = nullptr) const;

  // A stage of a pipeline: the layers of one of its chunks, and what the model has before or after
  // them. input: the result of the run of layers before, of StreamShape; undefined for the model's
  // first run. Returns such a result; of the model's last run, Loss. Not with set_exact nor
  // set_offload. The other passes are for models that are whole.
  Variable ForwardChunk(Tape& tape, SequenceParallelAttention& attention,
                        const SequenceBatch& batch, int chunk, const Variable& input,
                        double loss_scale, const DropoutKey& dropout) const;
  // Between layers on this rank: [batch, tokens, width].
  Shape StreamShape(const SequenceBatch& batch) const;

  // Logits [batch, length, vocab] of all tokens; for tests and evaluation of short inputs. These
  // and the two below are for models whose values are whole (not of stage 3).
  Variable Logits(Tape& tape, SequenceParallelAttention& attention,
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
  // OutOfRange, with the cache as it was, when a gpt2 model would grow past its context; the
  // communicator's error for a failed transfer.
  absl::StatusOr<Tensor> Decode(KvCache& cache, const Tensor& tokens) const;

  // Multiply-add FLOPs (2 per multiply-add) of a forward and backward pass per token: 6 x (the
  // parameters of GEMMs) + 12 layers (channels of all heads) seqlen, and with half of the attention
  // term.
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

  // The residual stream after the final normalization, [batch, length, width].
  Variable Hidden(const ForwardPass& pass, const Tensor& tokens, const Tensor& positions,
                  const GradientsReady& ready = nullptr) const;
  Variable Hidden(Tape& tape, SequenceParallelAttention& attention, const SequenceBatch& batch,
                  const DropoutKey& dropout, const GradientsReady& ready = nullptr,
                  KvCache* cache = nullptr) const;

  Variable Embed(const ForwardPass& pass, const Tensor& tokens, const Tensor& positions) const;
  Variable Layers(const ForwardPass& pass, const LayerRange& layers, Variable x,
                  const GradientsReady& ready) const;
  Variable FinalNorm(const ForwardPass& pass, const Variable& x) const;
  // Of set_exact.
  std::shared_ptr<const ChunkOptions> Chunks(const SequenceBatch& batch) const;
  Variable LossInChunks(Tape& tape, const Variable& x, const Tensor& targets, double loss_scale,
                        const std::shared_ptr<const ChunkOptions>& chunks) const;

  // The layers are taken in segments [first, end), of one each unless these are set. kept: as
  // Layer's, of one.
  Variable Segment(const ForwardPass& pass, size_t first, size_t end, const Variable& x,
                   const GradientsReady& ready, std::shared_ptr<KeptAttention>* kept) const;
  // `again`: the backward follows at once.
  Variable LayersOfSegment(const ForwardPass& pass, size_t first, size_t end, bool again,
                           Variable x, const GradientsReady& ready,
                           std::shared_ptr<KeptAttention>* kept) const;
  bool Recomputes(size_t layer) const;
  bool KeepsAttention() const {
    return recompute_ == Recompute::kSelective || recompute_ == Recompute::kSequence;
  }
  bool Offloads(size_t segment) const {
    return Recomputes(segment * segment_) && (segment + 1) * segment_ < blocks_.size();
  }
  // kept: becomes what a recomputing layer keeps of attention; null if nothing.
  Variable Layer(const ForwardPass& pass, size_t layer, const Variable& x,
                 std::shared_ptr<KeptAttention>* kept) const;
  // Of a pass, by segment; null: the backward finds everything on the device.
  using OffloadedLayers = std::vector<std::unique_ptr<OffloadedLayer>>;
  void Offload(Tape& tape, size_t segment, const Variable& input,
               const std::shared_ptr<KeptAttention>& kept,
               const std::shared_ptr<OffloadedLayers>& segments) const;

  // The uses of the parameters in a pass, in the order of the forward; see use_. Unit 0 are the
  // embeddings, then come the layers, then what follows them.
  void BeginEmbedding(Tape& tape) const;
  void EndEmbedding(Tape& tape) const;
  void BeginLayer(Tape& tape, size_t layer, bool prefetches) const;
  // segment: its first layer.
  void EndLayer(Tape& tape, size_t layer, size_t segment, bool backward_follows) const;
  void BeginHead(Tape& tape) const;
  void EndHead(Tape& tape) const;

  const Variable& head() const { return config_.tied_embeddings ? token_embedding_ : head_; }

  const ModelConfig config_;
  const TensorParallel parallel_;
  const PipelinePart part_;
  RopeAngles rope_angles_;  // llama
  Recompute recompute_ = Recompute::kNone;
  int64_t recompute_every_ = 1;
  size_t segment_ = 1;
  // With kSequence, of the last pass's schedule: that of its earlier half.
  mutable std::shared_ptr<const RingSchedule> prefix_, prefix_of_;
  int64_t ffn_chunk_ = 0, head_chunk_ = 0;
  int64_t exact_chunk_ = 0, exact_tokens_ = 0;  // of set_exact; 0: not set
  std::unique_ptr<HostCopies> copies_;          // with offload, else null
  ParameterUse* use_ = nullptr;
  ParameterList parameters_;
  Variable token_embedding_;     // [vocab, width]
  Variable position_embedding_;  // [context, width], gpt2
  std::vector<Block> blocks_;
  std::vector<int> first_parameter_;  // of each block, then of what follows
  std::unique_ptr<Normalization> final_norm_;
  Variable head_;  // [vocab, width], unless tied
};

}  // namespace burst
