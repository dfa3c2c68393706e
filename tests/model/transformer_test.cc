// Compares the forward of whole models with a naive one that is written without the library. Tests
// what logits depend on. transformer_gradients_test tests the backward, decode_test generation.
#include "model/transformer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/ops/ops.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/model_checks.h"
#include "tests/model/naive_transformer.h"
#include "tests/model/small_models.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

TEST(Transformer, LlamaEqualsNaive) {
  for (const bool packed : {false, true}) {
    for (const bool tied : {false, true}) {
      for (const int64_t kv_heads : {0, 1, 2}) {
        ModelConfig config = SmallLlama(tied);
        config.kv_heads = kv_heads;
        const auto model = MakeModel(config);
        const Text text = RandomText(config.vocab, packed);
        ExpectClose(Logits(*model, text), NaiveTransformer(*model, text).Logits(),
                    kDoubleTolerance);
      }
    }
  }
}

TEST(Transformer, QwenEqualsNaive) {
  for (const QkNorm norm : {QkNorm::kNone, QkNorm::kHead, QkNorm::kAll}) {
    for (const bool tied : {false, true}) {
      for (const int64_t head_dim : {0, 2, 6}) {
        ModelConfig config = SmallQwen(tied);
        config.qk_norm = norm;
        config.head_dim = head_dim;
        const auto model = MakeModel(config);
        const Text text = RandomText(config.vocab, /*packed=*/tied);
        ExpectClose(Logits(*model, text), NaiveTransformer(*model, text).Logits(),
                    kDoubleTolerance);
      }
    }
  }
}

TEST(Transformer, LayersOfTheirOwnWindowsAndBasesEqualNaive) {
  for (const ModelConfig& config : {SmallLayered(), SmallGemma()}) {
    const auto model = MakeModel(config);
    for (const bool packed : {false, true}) {
      const Text text = RandomText(config.vocab, packed);
      for (const int64_t window : {0, 1, 3, 100}) {
        ExpectClose(Logits(*model, text, window),
                    NaiveTransformer(*model, text, nullptr, nullptr, window).Logits(),
                    kDoubleTolerance);
      }
    }
  }
}

TEST(Transformer, NormalizationAfterTheBranchesEqualsNaive) {
  for (const ModelConfig& config : ModelsOfOtherNorms()) {
    for (const bool packed : {false, true}) {
      const auto model = MakeModel(config);
      const Text text = RandomText(config.vocab, packed);
      ExpectClose(Logits(*model, text), NaiveTransformer(*model, text).Logits(), kDoubleTolerance);
    }
  }
}

// Texts have short angles up to first_context, and longer ones have others.
TEST(Transformer, PartialRotationAndLongRopeEqualNaive) {
  for (const int64_t head_dim : {4, 6, 10}) {
    for (const int64_t length : {8, 9}) {
      ModelConfig config = SmallPhi();
      config.head_dim = head_dim;
      config.rope_scaling.first_context = 8;
      const auto model = MakeModel(config);
      const Text text = RandomText(config.vocab, /*packed=*/head_dim == 10, length);
      const Values logits = Logits(*model, text);
      ExpectClose(logits, NaiveTransformer(*model, text).Logits(), kDoubleTolerance);
      std::swap(config.rope_scaling.short_factors, config.rope_scaling.long_factors);
      const Values others = Logits(*MakeModel(config), text);
      double changed = 0;
      for (size_t i = 0; i < logits.size(); ++i) {
        changed = std::max(changed, std::abs(logits[i] - others[i]));
      }
      EXPECT_GT(changed, 1e-3);
    }
  }
}

TEST(Transformer, Gpt2EqualsNaive) {
  for (const bool packed : {false, true}) {
    for (const bool tied : {false, true}) {
      ModelConfig config = SmallGpt2();
      config.tied_embeddings = tied;
      const auto model = MakeModel(config);
      const Text text = RandomText(config.vocab, packed);
      ExpectClose(Logits(*model, text), NaiveTransformer(*model, text).Logits(), kDoubleTolerance);
    }
  }
}

// Returns the summed loss over the text's targets.
double LossOf(const Values& logits, const Text& text) {
  const int64_t vocab = static_cast<int64_t>(logits.size() / text.tokens.size());
  double loss = 0;
  for (size_t t = 0; t < text.targets.size(); ++t) {
    if (text.targets[t] < 0) continue;
    double sum = 0;
    for (int64_t v = 0; v < vocab; ++v) sum += std::exp(logits[t * vocab + v]);
    loss += std::log(sum) - logits[t * vocab + text.targets[t]];
  }
  return loss;
}

TEST(Transformer, LossIsThatOfTheLogits) {
  const auto model = MakeModel(SmallLlama(false));
  const Text text = RandomText(13, true);
  const double expected = LossOf(Logits(*model, text), text);
  SingleRank single(text);
  Tape tape(false);
  const Variable loss = model->Loss(tape, *single.attention, single.batch, 0.25, DropoutKey());
  EXPECT_NEAR(loss.value().ToVector<double>()[0], 0.25 * expected, kDoubleTolerance * expected);
}

TEST(Transformer, DropoutAppliesToTheEmbeddingAndToEachBranch) {
  for (ModelConfig config : {SmallLlama(false), SmallGpt2(), SmallOlmo()}) {
    config.dropout = 0.3;
    const auto model = MakeModel(config);
    const Text text = RandomText(config.vocab, true);
    SingleRank single(text);
    DropoutKey key;
    key.seed = 8;
    key.step = 9;
    key.enabled = true;
    const auto mask = [&](int64_t place) {
      DropoutSite site;
      site.rate = config.dropout;
      site.key = key;
      site.site = place;
      site.positions = Tensor::FromVector(
          single.batch.schedules.shard().group_positions(/*index=*/0), {text.length}, kTestDevice);
      const Tensor ones =
          Tensor::Empty({text.batch, text.length, config.width}, DType::kFloat64, kTestDevice);
      ones.Fill(1);
      Tape tape(false);
      return Dropout(tape, Variable(ones), site).value().ToVector<double>();
    };
    const double expected = LossOf(NaiveTransformer(*model, text, mask).Logits(), text);
    Tape tape(false);
    const Variable loss = model->Loss(tape, *single.attention, single.batch, 1, key);
    EXPECT_NEAR(loss.value().ToVector<double>()[0], expected, kDoubleTolerance * expected);
  }
}

ExecutionPlan InHeadGroups(int64_t kv_heads) {
  ExecutionPlan plan;
  plan.head_chunk = kv_heads;
  return plan;
}

TEST(Transformer, SinksEqualNaive) {
  for (const ModelConfig& config : ModelsWithSinks()) {
    for (const bool packed : {false, true}) {
      const auto model = MakeModel(config);
      const Text text = RandomText(config.vocab, packed);
      const Values expected = NaiveTransformer(*model, text).Logits();
      for (const int64_t head_chunk : {0, 1}) {
        model->SetExecution(InHeadGroups(head_chunk));
        ExpectClose(Logits(*model, text), expected, kDoubleTolerance);
      }
    }
  }
}

// Every query head has a sink, which is 0 at first. The optimizer does not decay it.
TEST(Transformer, SinksAreParametersOfTheHeads) {
  for (const ModelConfig& config : ModelsWithSinks()) {
    const auto model = *Transformer::Create(config, DType::kFloat64, /*seed=*/3, kTestDevice);
    int64_t found = 0;
    for (const Parameter& p : model->parameters().all()) {
      if (p.name.find("attention.sinks") == std::string::npos) continue;
      ++found;
      EXPECT_EQ(p.shape, Shape{config.heads});
      EXPECT_FALSE(p.decay);
      EXPECT_EQ(p.variable.value().ToVector<double>(), Values(config.heads, 0));
    }
    EXPECT_EQ(found, config.layers);
    ModelConfig without = config;
    without.attention_sinks = false;
    EXPECT_EQ(*Transformer::CountParameters(config),
              *Transformer::CountParameters(without) + config.layers * config.heads);
  }
}

TEST(Transformer, SoftcapEqualsNaive) {
  for (const ModelConfig& config : ModelsOfChangedScores()) {
    for (const bool packed : {false, true}) {
      const auto model = MakeModel(config);
      const Text text = RandomText(config.vocab, packed);
      ExpectClose(Logits(*model, text), NaiveTransformer(*model, text).Logits(), kDoubleTolerance);
    }
  }
}

// Drops weights of batch rows from 5 on, as a data-parallel rank has them. Head chunks drop the
// same weights.
TEST(Transformer, AttentionDropsWeightsByTheirPlace) {
  constexpr int64_t kFirstRow = 5;
  for (ModelConfig config : ModelsOfChangedScores()) {
    config.dropout = 0;
    const auto model = MakeModel(config);
    const Text text = RandomText(config.vocab, true);
    SingleRank single(text, 0, config);
    DropoutKey key;
    key.seed = 8;
    key.step = 9;
    key.first_row = kFirstRow;
    const auto weight = [&](int64_t layer, int64_t row, int64_t head, int64_t t, int64_t s) {
      const PhiloxCounter mixed = Philox(key.seed, (uint64_t{0xa} << 60) + layer, key.step);
      const auto word = [](int64_t n) { return static_cast<uint32_t>(n); };
      const PhiloxCounter words = Philox(uint64_t{mixed[0]} << 32 | mixed[1],
                                         {word(s / 4), word(t), word(head), word(row + kFirstRow)});
      const double rate = config.attention_dropout;
      return words[s % 4] * 0x1p-32 < rate ? 0 : 1 / (1 - rate);
    };
    const double without = LossOf(NaiveTransformer(*model, text).Logits(), text);
    const double with = LossOf(NaiveTransformer(*model, text, nullptr, weight).Logits(), text);
    EXPECT_GT(std::abs(with - without), 1e-3 * without);
    for (const int64_t head_chunk : {0, 1}) {
      model->SetExecution(InHeadGroups(head_chunk));
      for (const bool enabled : {false, true}) {
        key.enabled = enabled;
        Tape tape(false);
        const Variable loss = model->Loss(tape, *single.attention, single.batch, 1, key);
        EXPECT_NEAR(loss.value().ToVector<double>()[0], enabled ? with : without,
                    kDoubleTolerance * without);
      }
    }
  }
}

TEST(Transformer, LaterTokensDoNotChangeEarlierLogits) {
  for (const ModelConfig& config : {SmallLlama(false), SmallGpt2()}) {
    const auto model = MakeModel(config);
    Text text = RandomText(config.vocab, false);
    const Values before = Logits(*model, text);
    const int64_t changed = 5;
    text.tokens[changed] = (text.tokens[changed] + 1) % config.vocab;  // a token of row 0
    const Values after = Logits(*model, text);
    for (int64_t t = 0; t < text.length; ++t) {
      const auto row = [&](const Values& logits, int64_t batch_row) {
        const auto begin = logits.begin() + (batch_row * text.length + t) * config.vocab;
        return Values(begin, begin + config.vocab);
      };
      EXPECT_EQ(row(before, 0) == row(after, 0), t < changed) << t;
      EXPECT_EQ(row(before, 1), row(after, 1)) << "the other row of the batch, token " << t;
    }
  }
}

TEST(Transformer, DocumentsDoNotSeeEachOther) {
  for (const ModelConfig& config : {SmallLlama(false), SmallGpt2()}) {
    const auto model = MakeModel(config);
    const Text packed = RandomText(config.vocab, true);
    const Values logits = Logits(*model, packed);
    Text alone = packed;  // the second document of row 0, tokens 4 to 8, by itself
    alone.batch = 1;
    alone.length = 5;
    alone.documents.clear();
    alone.tokens = {packed.tokens.begin() + 4, packed.tokens.begin() + 9};
    alone.positions = {0, 1, 2, 3, 4};
    alone.targets.assign(5, -1);
    const auto begin = logits.begin() + 4 * config.vocab;
    ExpectClose(Logits(*model, alone), Values(begin, begin + 5 * config.vocab), kDoubleTolerance);
  }
}

}  // namespace
}  // namespace burst
