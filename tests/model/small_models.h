// Models and texts small enough to be computed by hand, on the device of the test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/philox.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/transformer.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"

namespace burst {

inline ModelConfig SmallLlama(bool tied) {
  ModelConfig config;
  config.family = Family::kLlama;
  config.layers = 2;
  config.width = 16;
  config.heads = 4;
  config.kv_heads = 2;
  config.ffn = 20;
  config.vocab = 13;
  config.tied_embeddings = tied;
  return config;
}

// Returns a model with the features of Qwen3 and Qwen2 together: wide heads, biases and
// normalization of queries and keys, scaled RoPE. It also has all biases of Llama.
inline ModelConfig SmallQwen(bool tied = false) {
  ModelConfig config = SmallLlama(tied);
  config.head_dim = 6;
  config.qkv_bias = config.attention_out_bias = config.ffn_bias = true;
  config.qk_norm = QkNorm::kHead;
  config.rope_theta = 100;
  config.rope_scaling.kind = RopeScaling::Kind::kYarn;
  config.rope_scaling.factor = 4;
  config.rope_scaling.first_context = 32;
  config.rope_scaling.fast = 3;
  return config;
}

// Returns a model whose middle layer has full attention. The other layers have a run's window and
// a RoPE base of their own.
inline ModelConfig SmallLayered() {
  ModelConfig config = SmallQwen();
  config.layers = 3;
  config.full_layers = {1};
  config.window_rope_theta = 50;
  return config;
}

// Returns a model that turns 4 of a head's 6 channels by LongRoPE. Texts of more than 2 tokens are
// long.
inline ModelConfig SmallPhi() {
  ModelConfig config = SmallLlama(false);
  config.head_dim = 6;
  config.rope_channels = 4;
  config.rope_theta = 100;
  config.rope_scaling.kind = RopeScaling::Kind::kLongRope;
  config.rope_scaling.factor = 16;
  config.rope_scaling.first_context = 2;
  config.rope_scaling.short_factors = {1, 1.5};
  config.rope_scaling.long_factors = {1.25, 4};
  return config;
}

// Returns a model that normalizes after the branches, and queries and keys over all heads.
inline ModelConfig SmallOlmo() {
  ModelConfig config = SmallLlama(false);
  config.head_dim = 6;
  config.qk_norm = QkNorm::kAll;
  config.norm_position = NormPosition::kAfter;
  return config;
}

// Returns a model with the features of Gemma 2 and 3 together.
inline ModelConfig SmallGemma() {
  ModelConfig config = SmallLayered();
  config.qkv_bias = config.attention_out_bias = config.ffn_bias = false;
  config.tied_embeddings = config.unit_offset_norms = config.scaled_embedding = true;
  config.norm_position = NormPosition::kBoth;
  config.gate = Gate::kGelu;
  config.score_channels = 9;
  config.logits_softcap = 3;
  return config;
}

// Returns models that normalize after the branches, alone or also before them.
inline std::vector<ModelConfig> ModelsOfOtherNorms() {
  std::vector<ModelConfig> models = {SmallOlmo(), SmallQwen(), SmallGemma()};
  models[1].norm_position = NormPosition::kBoth;
  models[1].dropout = 0.3;
  return models;
}

inline ModelConfig SmallGpt2(double dropout = 0) {
  ModelConfig config;
  config.family = Family::kGpt2;
  config.layers = 2;
  config.width = 12;
  config.heads = 3;
  config.ffn = 20;
  config.vocab = 13;
  config.context = 12;
  config.tied_embeddings = true;
  config.dropout = dropout;
  return config;
}

// Returns the models whose attention has a softcap and drops weights, two of them with sinks.
// Scores are of order 1.
inline std::vector<ModelConfig> ModelsOfChangedScores() {
  std::vector<ModelConfig> models = {SmallLlama(false), SmallQwen(), SmallGpt2(0.3)};
  for (ModelConfig& config : models) {
    config.attention_softcap = 0.8;
    config.attention_dropout = 0.3;
  }
  models[1].attention_sinks = models[2].attention_sinks = true;
  return models;
}

// Returns the models whose attention has sinks. Their sinks' logits are of order 1 (MakeModel).
inline std::vector<ModelConfig> ModelsWithSinks() {
  std::vector<ModelConfig> models = {SmallLlama(false), SmallQwen(), SmallGpt2(0.3)};
  for (ModelConfig& config : models) config.attention_sinks = true;
  return models;
}

// Makes a model with large values. Initial values are too close to zero (and biases are zero) to
// tell errors from rounding.
inline std::unique_ptr<Transformer> MakeModel(const ModelConfig& config,
                                              DType dtype = DType::kFloat64) {
  auto model = Transformer::Create(config, dtype, /*seed=*/3, kTestDevice);
  EXPECT_TRUE(model.ok()) << model.status();
  const Tensor& values = (*model)->parameters().values();
  values.Add(RandomTensor(values.shape(), 5, 0.3, dtype).To(kTestDevice));
  return *std::move(model);
}

// Holds a whole batch, before it is cut for the ranks of a ring.
struct Text {
  int64_t batch = 2;
  int64_t length = 9;
  std::vector<int32_t> tokens, positions, targets;  // [batch, length]
  DocumentStarts documents;
};

inline Text RandomText(int64_t vocab, bool packed, int64_t length = 9) {
  Text text;
  text.length = length;
  if (packed) text.documents = {{0, 4}, {0, 3, static_cast<int32_t>(length) - 2}};
  for (int64_t row = 0; row < text.batch; ++row) {
    int32_t start = 0;
    for (int32_t t = 0; t < length; ++t) {
      if (packed && std::count(text.documents[row].begin(), text.documents[row].end(), t) > 0) {
        start = t;
      }
      const PhiloxCounter bits = Philox(17, row, t);
      text.tokens.push_back(bits[0] % vocab);
      text.targets.push_back(t == 2 ? -1 : bits[1] % vocab);
      text.positions.push_back(t - start);
    }
  }
  return text;
}

// Returns the part of the text at `positions` of the sequence.
inline SequenceBatch Cut(const Text& text, const LayerSchedules& schedules) {
  const std::vector<int32_t>& positions = schedules.shard().local_positions();
  const int64_t length = static_cast<int64_t>(positions.size());
  const auto cut = [&](const std::vector<int32_t>& all) {
    std::vector<int32_t> part;
    for (int64_t row = 0; row < text.batch; ++row) {
      for (const int32_t position : positions) part.push_back(all[row * text.length + position]);
    }
    return Tensor::FromVector(part, {text.batch, length}, kTestDevice);
  };
  return {cut(text.tokens), cut(text.positions), cut(text.targets), schedules};
}

// Returns the options of a model's attention.
inline ScoreOptions ScoresOf(const ModelConfig& config) {
  return {config.attention_softcap, {}, config.attention_dropout};
}

// Returns the schedules of a model's layers for the text.
inline absl::StatusOr<LayerSchedules> SchedulesOf(const ModelConfig& config,
                                                  const SequenceParallelAttention& attention,
                                                  const Text& text, int64_t window = 0) {
  return MakeLayerSchedules(config, attention, text.length,
                            Mask::SlidingWindow(window).WithDocuments(text.documents));
}

struct SingleRank {
  explicit SingleRank(const Text& text, int64_t window = 0, const ModelConfig& config = {}) {
    BurstAttentionOptions options;
    options.scores = ScoresOf(config);
    attention = *BurstAttention::Create(options, nullptr);
    batch = Cut(text, *SchedulesOf(config, *attention, text, window));
  }
  std::unique_ptr<BurstAttention> attention;
  SequenceBatch batch;
};

}  // namespace burst
