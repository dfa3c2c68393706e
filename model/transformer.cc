#include "model/transformer.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/attention/cached_attention.h"
#include "burst/autograd/tape.h"
#include "burst/base/parallel.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// GPT-2's standard deviation of the initial weights of embeddings, and therefore of a tied head.
constexpr double kEmbeddingStd = 0.02;

absl::Status CheckComplete(const ModelConfig& config) {
  BURST_RETURN_IF_ERROR(config.Validate());
  if (config.vocab == 0) {
    return absl::InvalidArgumentError("model vocab: must be the size of a vocabulary; got 0");
  }
  if (config.family == Family::kGpt2 && config.context == 0) {
    return absl::InvalidArgumentError(
        "model context is 0; a gpt2 model needs the number of positions to learn");
  }
  return absl::OkStatus();
}

Transformer::TargetScore ScoreOf(const double* logits, int64_t vocab, int32_t target) {
  const double max = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(logits[i] - max);
  return {std::log(sum) + max - logits[target], logits[target] == max};
}

}  // namespace

SequenceBatch SequenceBatch::To(DeviceType device) const {
  return {tokens.To(device), positions.To(device), targets.null() ? Tensor() : targets.To(device),
          schedules};
}

absl::StatusOr<std::unique_ptr<Transformer>> Transformer::Create(
    const ModelConfig& config, DType dtype, std::optional<uint64_t> seed, DeviceType device,
    const TensorParallel& parallel, const StateSharding& sharding, const PipelinePart& part) {
  BURST_RETURN_IF_ERROR(CheckComplete(config));
  BURST_RETURN_IF_ERROR(TensorParallel::Check("tensor parallelism", config, parallel.ranks()));
  std::unique_ptr<Transformer> model(new Transformer(config.WithDefaults(), parallel, part));
  model->parameters_.Allocate(dtype, device, sharding);
  if (seed.has_value()) model->parameters_.Initialize(*seed);
  return model;
}

absl::StatusOr<std::vector<Parameter>> Transformer::ParametersOf(const ModelConfig& config) {
  BURST_RETURN_IF_ERROR(CheckComplete(config));
  return Transformer(config.WithDefaults()).parameters_.all();
}

absl::StatusOr<int64_t> Transformer::CountParameters(const ModelConfig& config) {
  BURST_RETURN_IF_ERROR(CheckComplete(config));
  return Transformer(config.WithDefaults()).parameters_.numel();
}

Transformer::Transformer(const ModelConfig& config, const TensorParallel& parallel,
                         const PipelinePart& part)
    : config_(config),
      parallel_(parallel),
      part_(part),
      uses_(config.layers, config.tied_embeddings, part),
      runner_(blocks_, first_parameter_, uses_, part_) {
  BURST_CHECK(part.runs() <= config.layers) << part.runs() << " runs of layers";
  if (config.family == Family::kLlama) {
    for (const bool is_long : {false, true}) {
      rope_angles_[is_long] = {config.AnglesOf(false, is_long), config.AnglesOf(true, is_long)};
    }
  }
  const Shape table = {config.vocab, config.width};
  const ParameterSharding replicated = parallel.Replicated();
  const bool copies = part.HasLast() && !part.HasFirst() && config.tied_embeddings;
  parameters_.set_elsewhere(!part.HasFirst() && !copies);
  parameters_.Add("embedding.tokens", table, 0, kEmbeddingStd, true, &token_embedding_, replicated);
  if (copies) parameters_.MarkCopy();
  parameters_.set_elsewhere(!part.HasFirst());
  if (config.family == Family::kGpt2) {
    parameters_.Add("embedding.positions", {config.context, config.width}, 0, kEmbeddingStd, true,
                    &position_embedding_, replicated);
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    parameters_.EndUnit();
    first_parameter_.push_back(parameters_.size());
    parameters_.set_elsewhere(!part.HasLayer(config.layers, layer));
    blocks_.emplace_back(
        LayerScope{config_, parallel_, &parameters_, absl::StrCat("layers.", layer, ".")}, layer);
  }
  parameters_.EndUnit();
  first_parameter_.push_back(parameters_.size());
  parameters_.set_elsewhere(!part.HasLast());
  const LayerScope after_layers{config_, parallel_, &parameters_, ""};
  final_norm_ = MakeNormalization(after_layers, "final_norm", replicated);
  if (!config.tied_embeddings) {
    parameters_.Add("head.weight", table, 0, kEmbeddingStd, true, &head_, replicated);
  }
  parameters_.EndUnit();
}

void Transformer::SetExecution(const ExecutionPlan& plan) {
  const bool exact = plan.exact.chunk > 0;
  const int64_t channels = parallel_.LocalCount(config_.heads) * config_.head_dim;
  runner_.SetPlan(plan, device(), config_.width * SizeOf(dtype()), channels * SizeOf(dtype()));
  parameters_.set_float8_weights(Float8Weights(plan));
  if (!exact) return;
  BURST_CHECK(plan.exact.tokens >= 1 && parallel_.ranks() == 1);
  // Each chunk contributes to the gradient of the mean loss, twice where the embeddings' table is
  // the head. Elements sum exactly up to 2^11 at least, in steps of 9e-13.
  parameters_.SumGradsExactly(
      ExactGrid::For(0x1p-40, 2 * (plan.exact.tokens / plan.exact.chunk + 1)));
}

// A layer's matrices are the weights of its projections. Groups of heads take rows of the first
// one, which have scales of their own.
std::vector<int> Transformer::Float8Weights(const ExecutionPlan& plan) const {
  std::vector<int> weights;
  if (plan.linear_precision != LinearPrecision::kFloat8) return weights;
  const bool in_groups = plan.HeadsAtATime(config_.kv_heads) < config_.kv_heads;
  const int64_t end = std::min(config_.layers, plan.rounded_layers.end);
  for (int64_t layer = plan.rounded_layers.begin; layer < end; ++layer) {
    for (int i = first_parameter_[layer]; i < first_parameter_[layer + 1]; ++i) {
      const Parameter& parameter = parameters_[i];
      if (parameter.shape.size() != 2) continue;
      if (in_groups && absl::EndsWith(parameter.name, "attention.qkv.weight")) continue;
      weights.push_back(i);
    }
  }
  return weights;
}

Variable Transformer::Hidden(const ForwardPass& pass, const SequenceBatch& batch, bool fills_cache,
                             const GradientsReady& ready) const {
  const auto on_backward = [&](int first, int last) {
    if (ready != nullptr) pass.tape.OnBackward([=] { ready(first, last); });
  };
  ReachOp(/*layer=*/-1, "embedding", /*on_device=*/true);
  on_backward(0, first_parameter_[0]);
  const Variable x =
      runner_.Run(pass, {0, config_.layers}, Embed(pass, batch.tokens, batch.positions),
                  batch.schedules, fills_cache, ready);
  ReachOp(/*layer=*/-1, "head", /*on_device=*/true);
  on_backward(first_parameter_.back(), parameters_.size());
  return FinalNorm(pass, x);
}

Variable Transformer::FinalNorm(const ForwardPass& pass, const Variable& stream) const {
  uses_.BeginHead(pass.tape);
  const Variable x = pass->parallel->FromLayers(pass.tape, pass->shard, stream);
  if (pass->chunks == nullptr) return final_norm_->Forward(pass, x);
  return pass.InChunks({x}, {config_.width}, dtype(), device(),
                       [this](const ForwardPass& of_chunk, const std::vector<Variable>& inputs) {
                         return final_norm_->Forward(of_chunk, inputs[0]);
                       });
}

// Returns the token (and position) embeddings after dropout.
Variable Transformer::Embed(const ForwardPass& pass, const Tensor& tokens,
                            const Tensor& positions) const {
  if (pass->chunks != nullptr) {
    return burst::InChunks(pass.tape, {}, *pass->chunks, {config_.width}, dtype(), device(),
                           [&](Tape& tape, const std::vector<Variable>&, const TokenChunk& chunk) {
                             return Embed(pass.Of(chunk, tape), chunk.Of(tokens),
                                          chunk.Of(positions));
                           });
  }
  uses_.BeginEmbedding(pass.tape);
  Variable x = config_.family == Family::kGpt2
                   ? Embedding(pass.tape, tokens, token_embedding_, positions, position_embedding_)
                   : Embedding(pass.tape, tokens, token_embedding_);
  uses_.EndEmbedding(pass.tape);
  if (config_.scaled_embedding) {
    x = Scale(pass.tape, x, std::sqrt(static_cast<double>(config_.width)));
  }
  x = pass->parallel->ToLayers(pass.tape, pass->shard, x);
  return Dropout(pass.tape, x, pass.DropoutAt(kEmbeddingSite));
}

void Transformer::SetRope(const Tensor& positions, int64_t length, PassContext* context) const {
  const auto& angles = rope_angles_[config_.rope_scaling.IsLong(length)];
  auto& [windowed, full] = context->rope;
  full = MakeRopeTable(positions, angles[true], parameters_.dtype());
  windowed = config_.window_rope_theta == 0
                 ? full
                 : MakeRopeTable(positions, angles[false], parameters_.dtype());
}

ForwardPass Transformer::MakePass(Tape& tape, SequenceParallelAttention& attention,
                                  const SequenceBatch& batch, const DropoutKey& dropout,
                                  KvCache* cache) const {
  uses_.BeginPass(tape);
  const ScoreOptions scores = attention.scores();
  BURST_CHECK_EQ(scores.softcap, config_.attention_softcap) << "the model's, and attention's";
  BURST_CHECK(!dropout.enabled || scores.dropout == config_.attention_dropout)
      << "the model drops " << config_.attention_dropout << " of the weights, attention "
      << scores.dropout;
  const LayerSchedules schedules = batch.schedules;
  auto context = std::make_shared<PassContext>();
  context->parallel = &parallel_;
  context->shard = std::shared_ptr<const TokenShard>(schedules.windowed, &schedules.shard());
  if (schedules.windowed->exact() != nullptr && cache == nullptr) context->chunks = Chunks(batch);
  context->linear_precision = runner_.plan().linear_precision;
  context->dropout_rate = config_.dropout;
  context->dropout = dropout;
  // A recomputation calls `attend` later, on its own tape.
  context->attend = [this, &attention, schedules, cache](const ForwardPass& of, int64_t layer,
                                                         const Variable& qkv, const Variable& sinks,
                                                         const HeadGroup& group) {
    if (cache != nullptr) {
      const int64_t q = config_.heads, kv = config_.kv_heads;
      cache->Append(layer, qkv.value().Slice(2, q, kv), qkv.value().Slice(2, q + kv, kv));
    }
    const int64_t heads = parallel_.LocalCount(config_.heads) / group.count;
    const int64_t kv_heads = parallel_.LocalCount(config_.kv_heads) / group.count;
    const WeightDropout dropout = {AttentionDropoutSeed(of->dropout, layer), of->dropout.first_row,
                                   /*first_head=*/group.index * heads, of->dropout.enabled};
    const TapeAttention with = {attention, schedules.Of(config_.IsFull(layer)), dropout, sinks,
                                of->chunks == nullptr ? nullptr : of->chunks->chunk_done};
    return AttentionOp(of.tape, with, qkv, heads, kv_heads, of.kept_attention.get(), group);
  };
  if (config_.family == Family::kLlama) {
    const Tensor positions = parallel_.AttentionPositions(tape, context->shard, batch.positions);
    SetRope(positions, context->shard->seqlen(), context.get());
  }
  if (dropout.enabled) {
    const std::vector<int32_t>& positions = parallel_.StreamPositions(*context->shard);
    context->global_positions = Tensor::FromVector(
        positions, {static_cast<int64_t>(positions.size())}, batch.tokens.device());
  }
  return {tape, std::move(context)};
}

Variable Transformer::Hidden(Tape& tape, SequenceParallelAttention& attention,
                             const SequenceBatch& batch, const DropoutKey& dropout,
                             const GradientsReady& ready, KvCache* cache) const {
  BURST_CHECK_EQ(part_.stages, 1) << "a stage of a pipeline has no pass of its own";
  return Hidden(MakePass(tape, attention, batch, dropout, cache), batch, cache != nullptr, ready);
}

Variable Transformer::ForwardChunk(Tape& tape, SequenceParallelAttention& attention,
                                   const SequenceBatch& batch, int chunk, const Variable& input,
                                   const LossTerms& terms, const DropoutKey& dropout) const {
  BURST_CHECK(runner_.plan().exact.chunk == 0 && !runner_.plan().offload.activations);
  const ForwardPass pass = MakePass(tape, attention, batch, dropout, /*cache=*/nullptr);
  const Variable x =
      runner_.Run(pass, part_.Layers(config_.layers, chunk),
                  part_.IsFirst(chunk) ? Embed(pass, batch.tokens, batch.positions) : input,
                  batch.schedules, /*fills_cache=*/false, /*ready=*/nullptr);
  if (!part_.IsLast(chunk)) return x;
  ReachOp(/*layer=*/-1, "head", /*on_device=*/true);
  const Variable loss =
      LinearCrossEntropy(tape, FinalNorm(pass, x), head(), batch.targets, OwnTerms(terms));
  uses_.EndHead(tape);
  return loss;
}

Shape Transformer::StreamShape(const SequenceBatch& batch) const {
  const auto tokens =
      static_cast<int64_t>(parallel_.StreamPositions(batch.schedules.shard()).size());
  return {batch.tokens.dim(0), tokens, config_.width};
}

Variable Transformer::Loss(Tape& tape, SequenceParallelAttention& attention,
                           const SequenceBatch& batch, const LossTerms& terms,
                           const DropoutKey& dropout, const GradientsReady& ready) const {
  const Variable x = Hidden(tape, attention, batch, dropout, ready);
  if (batch.schedules.windowed->exact() != nullptr) {
    return LossInChunks(tape, x, batch.targets, terms, Chunks(batch));
  }
  const Variable loss = LinearCrossEntropy(tape, x, head(), batch.targets, OwnTerms(terms));
  uses_.EndHead(tape);
  return loss;
}

std::shared_ptr<const ChunkOptions> Transformer::Chunks(const SequenceBatch& batch) const {
  auto chunks = std::make_shared<ChunkOptions>();
  chunks->batch = batch.tokens.dim(0);
  chunks->length = batch.tokens.dim(1);
  const int64_t chunk = runner_.plan().exact.chunk, seqlen = batch.schedules.shard().seqlen();
  chunks->tokens = std::min(chunk, seqlen);
  chunks->rows = chunk / chunks->tokens;
  chunks->chunk_done = [this] { parameters_.AddGradsToSums(); };
  return chunks;
}

// The grid is as fine as sums of 2^12 nats a token on average allow.
Variable Transformer::LossInChunks(Tape& tape, const Variable& x, const Tensor& targets,
                                   const LossTerms& terms,
                                   const std::shared_ptr<const ChunkOptions>& chunks) const {
  const ExecutionPlan::Exact& exact = runner_.plan().exact;
  const int64_t count = exact.tokens / exact.chunk + 1;
  const int most = std::ilogb(terms.scale) + 1 + std::ilogb(static_cast<double>(exact.tokens)) + 1;
  return SumOfChunks(
      tape, {x}, *chunks, device(), ExactGrid::For(std::ldexp(1, most + 12 - 52), count),
      [&](Tape& tape, const std::vector<Variable>& inputs, const TokenChunk& chunk) {
        return LinearCrossEntropy(tape, inputs[0], head(), chunk.Of(targets), OwnTerms(terms));
      });
}

Variable Transformer::Logits(Tape& tape, SequenceParallelAttention& attention,
                             const SequenceBatch& batch) const {
  BURST_CHECK(!uses_.reports()) << "for whole models";
  return HeadLogits(tape, Hidden(tape, attention, batch, DropoutKey()));
}

Variable Transformer::HeadLogits(Tape& tape, const Variable& x) const {
  const Variable logits = Linear(tape, x, head());
  return config_.logits_softcap > 0 ? SoftCap(tape, logits, config_.logits_softcap) : logits;
}

absl::StatusOr<std::vector<Transformer::TargetScore>> Transformer::ScoreTargets(
    SequenceParallelAttention& attention, const SequenceBatch& batch) const {
  BURST_CHECK(!uses_.reports() && parallel_.ranks() == 1) << "for whole models";
  Tape tape(/*recording=*/false);
  const Tensor x = Hidden(tape, attention, batch, DropoutKey()).value().View({-1, config_.width});
  BURST_RETURN_IF_ERROR(tape.status());
  const std::vector<int32_t> targets = batch.targets.ToVector<int32_t>();
  const auto rows = static_cast<int64_t>(targets.size());
  const int64_t most = std::max<int64_t>(1, kLogitBytes / (config_.vocab * sizeof(double)));
  std::vector<TargetScore> scores;
  for (int64_t begin = 0; begin < rows; begin += most) {
    const int64_t end = std::min(rows, begin + most);
    if (*std::max_element(&targets[begin], &targets[begin] + (end - begin)) < 0) continue;
    const Variable part(x.Slice(0, begin, end - begin).Contiguous());
    const std::vector<double> logits = HeadLogits(tape, part).value().ToVector<double>();
    std::vector<TargetScore> found(end - begin);
    ParallelFor(end - begin, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        if (targets[begin + i] < 0) continue;
        found[i] = ScoreOf(&logits[i * config_.vocab], config_.vocab, targets[begin + i]);
      }
    });
    for (int64_t i = 0; i < end - begin; ++i) {
      if (targets[begin + i] >= 0) scores.push_back(found[i]);
    }
  }
  return scores;
}

absl::StatusOr<Tensor> Transformer::NextTokenLogits(SequenceParallelAttention& attention,
                                                    const SequenceBatch& batch,
                                                    KvCache* cache) const {
  const TokenShard& shard = batch.schedules.shard();
  if (cache != nullptr) {
    BURST_CHECK(parallel_.ranks() == 1 && cache->length() == 0 &&
                cache->batch() == batch.tokens.dim(0));
    cache->Reserve(shard.local_length());
  }
  Tape tape(/*recording=*/false);
  // [batch, length, width]
  const Variable x = Hidden(tape, attention, batch, DropoutKey(), /*ready=*/nullptr, cache);
  BURST_RETURN_IF_ERROR(tape.status());
  if (cache != nullptr) BURST_RETURN_IF_ERROR(cache->Advance(shard));
  const std::vector<int32_t>& positions = shard.local_positions();
  if (positions.empty() || positions.back() + 1 != shard.seqlen()) return Tensor();
  const Variable last(x.value().Slice(1, x.value().dim(1) - 1, 1).Contiguous());
  return HeadLogits(tape, last).value().View({batch.tokens.dim(0), config_.vocab});
}

absl::StatusOr<Tensor> Transformer::Decode(KvCache& cache, const Tensor& tokens) const {
  BURST_CHECK_EQ(parallel_.ranks(), 1) << "tensor parallelism does not decode";
  const int64_t batch = tokens.dim(0), n = tokens.dim(1), start = cache.length();
  BURST_CHECK(batch == cache.batch() && n >= 1)
      << ToString(tokens.shape()) << " for a cache of " << cache.batch() << " sequences";
  if (config_.family == Family::kGpt2 && start + n > config_.context) {
    return absl::OutOfRangeError(absl::StrCat(start + n, " tokens, but the model has learned ",
                                              config_.context, " positions"));
  }
  const RopeScaling& scaling = config_.rope_scaling;
  if (start > 0 && scaling.IsLong(start) != scaling.IsLong(start + n)) {
    return absl::OutOfRangeError(absl::StrCat(
        start + n, " tokens are long for the model's RoPE; the cache has short angles' keys"));
  }
  Tensor positions = Tensor::Empty({batch, n}, DType::kInt32);
  for (int64_t i = 0; i < batch * n; ++i) {
    positions.data<int32_t>()[i] = static_cast<int32_t>(start + i % n);
  }
  positions = positions.To(device());
  const CachedAttention windowed = cache.AttentionOfNext(n, /*full=*/false);
  const CachedAttention full =
      config_.full_layers.empty() ? windowed : cache.AttentionOfNext(n, /*full=*/true);
  const int64_t kept = cache.KeepsNext() ? n : 0;  // tokens that this rank keeps
  absl::Status status;
  Tape tape(/*recording=*/false);
  auto context = std::make_shared<PassContext>();
  context->parallel = &parallel_;
  context->attend = [&](const ForwardPass&, int64_t layer, const Variable& qkv,
                        const Variable& sinks, const HeadGroup&) {
    const auto heads = [&](int64_t first, int64_t count) {
      return qkv.value().Slice(2, first, count);
    };
    const int64_t q = config_.heads, kv = config_.kv_heads;
    const auto cached =
        cache.Append(layer, heads(q, kv).Slice(1, 0, kept), heads(q + kv, kv).Slice(1, 0, kept));
    if (status.ok()) {
      const CachedAttention& attention = config_.IsFull(layer) ? full : windowed;
      const absl::StatusOr<Tensor> out = attention.Forward(
          heads(0, q), cached.k, cached.v, sinks.defined() ? sinks.value() : Tensor());
      if (out.ok()) return Variable(*out);
      status = out.status();
    }
    return Variable(Tensor::Zeros({batch, n, q, config_.head_dim}, dtype(), device()));
  };
  if (config_.family == Family::kLlama) SetRope(positions, start + n, context.get());
  const ForwardPass pass{tape, std::move(context)};
  const SequenceBatch next{tokens.To(device()), positions, Tensor(), /*schedules=*/{}};
  const Variable x =
      Hidden(pass, next, /*fills_cache=*/true, /*ready=*/nullptr);  // [batch, n, width]
  BURST_RETURN_IF_ERROR(status);
  cache.Advance(n);
  const Variable last(x.value().Slice(1, n - 1, 1).Contiguous());
  return HeadLogits(tape, last).value().View({batch, config_.vocab});
}

Transformer::FlopsPerToken Transformer::TrainingFlopsPerToken(int64_t seqlen) const {
  const double width = config_.width, channels = config_.attention_channels();
  const double kv_channels = config_.kv_heads * config_.head_dim;
  const double ffn_gemms = config_.family == Family::kLlama ? 3 : 2;
  const double layer = 2 * width * (channels + kv_channels) + ffn_gemms * width * config_.ffn;
  const double gemm_parameters = config_.layers * layer + width * config_.vocab;
  const double attention = 6.0 * config_.layers * channels * seqlen;
  return {6 * gemm_parameters + 2 * attention, 6 * gemm_parameters + attention};
}

}  // namespace burst
