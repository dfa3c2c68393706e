// Whole models: against a naive forward written without the library, gradients of every parameter,
// what may depend on what, generation, and rings of several ranks.
#include "model/transformer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/autograd/tape.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/kv_cache.h"
#include "model/ops/ops.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/naive_transformer.h"
#include "tests/model/small_models.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

using Values = std::vector<double>;

Values Logits(const Transformer& model, const Text& text, int64_t window = 0) {
  SingleRank single(text, window, ScoresOf(model.config()));
  Tape tape(/*recording=*/false);
  const Variable logits = model.Logits(tape, *single.attention, single.batch);
  EXPECT_TRUE(tape.status().ok()) << tape.status();
  return logits.value().ToVector<double>();
}

// Both compute in double: sums of at most 20 terms through a dozen operations in a row, and logits
// of order 10.
constexpr double kDoubleTolerance = 1e-12;

void ExpectClose(const Values& actual, const Values& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  double scale = 0;
  for (double value : expected) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance * scale) << "element " << i;
  }
}

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
  for (const bool norm : {false, true}) {
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

// The summed loss over the text's targets.
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
  for (ModelConfig config : {SmallLlama(false), SmallGpt2()}) {
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
          single.batch.schedule->shard().group_positions(/*index=*/0), {text.length}, kTestDevice);
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

// The models whose attention has a softcap and drops weights, two of them beside sinks. Scores are
// of order 1.
std::vector<ModelConfig> ModelsOfChangedScores() {
  std::vector<ModelConfig> models = {SmallLlama(false), SmallQwen(), SmallGpt2(0.3)};
  for (ModelConfig& config : models) {
    config.attention_softcap = 0.8;
    config.attention_dropout = 0.3;
  }
  models[1].attention_sinks = models[2].attention_sinks = true;
  return models;
}

// Those whose attention has sinks; their logits are of order 1 (MakeModel).
std::vector<ModelConfig> ModelsWithSinks() {
  std::vector<ModelConfig> models = {SmallLlama(false), SmallQwen(), SmallGpt2(0.3)};
  for (ModelConfig& config : models) config.attention_sinks = true;
  return models;
}

TEST(Transformer, SinksEqualNaive) {
  for (const ModelConfig& config : ModelsWithSinks()) {
    for (const bool packed : {false, true}) {
      const auto model = MakeModel(config);
      const Text text = RandomText(config.vocab, packed);
      const Values expected = NaiveTransformer(*model, text).Logits();
      for (const int64_t head_chunk : {0, 1}) {
        model->set_head_chunk(head_chunk);
        ExpectClose(Logits(*model, text), expected, kDoubleTolerance);
      }
    }
  }
}

// Every query head has one, of 0 at first, which the optimizer does not decay.
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

// Of batch rows from 5 on, as of a data-parallel rank. Chunks of heads take weights from the same.
TEST(Transformer, AttentionDropsWeightsByTheirPlace) {
  constexpr int64_t kFirstRow = 5;
  for (ModelConfig config : ModelsOfChangedScores()) {
    config.dropout = 0;
    const auto model = MakeModel(config);
    const Text text = RandomText(config.vocab, true);
    SingleRank single(text, 0, ScoresOf(config));
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
      model->set_head_chunk(head_chunk);
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

// --- gradients
// ------------------------------------------------------------------------------------

// Of the parameters whose names have `part` in them.
void CheckModelGradients(const ModelConfig& config, Recompute recompute = Recompute::kNone,
                         int64_t head_chunk = 0, const std::string& part = "") {
  const auto model = MakeModel(config);
  model->set_recompute(recompute);
  model->set_head_chunk(head_chunk);
  const Text text = RandomText(config.vocab, /*packed=*/true, /*length=*/6);
  SingleRank single(text, /*window=*/0, ScoresOf(config));
  DropoutKey dropout;
  dropout.enabled = true;
  std::vector<NamedLeaf> leaves;
  for (const Parameter& parameter : model->parameters().all()) {
    if (parameter.name.find(part) == std::string::npos) continue;
    leaves.push_back({parameter.name, parameter.variable});
  }
  // Normalization over a dozen channels have large higher derivatives: a smaller step.
  const auto loss = [&](Tape& tape) -> std::vector<Variable> {
    return {model->Loss(tape, *single.attention, single.batch, 0.1, dropout)};
  };
  CheckGradients(leaves, loss, /*samples=*/0, kGradientTolerance, /*h=*/2e-4);
}

TEST(TransformerGradients, LlamaUntied) { CheckModelGradients(SmallLlama(false)); }
TEST(TransformerGradients, LlamaTied) { CheckModelGradients(SmallLlama(true)); }
TEST(TransformerGradients, Qwen) { CheckModelGradients(SmallQwen()); }
TEST(TransformerGradients, Gpt2WithDropout) { CheckModelGradients(SmallGpt2(0.3)); }
TEST(TransformerGradients, ChangedScores) {
  for (const ModelConfig& config : ModelsOfChangedScores()) {
    CheckModelGradients(config);
    CheckModelGradients(config, Recompute::kFull);
    CheckModelGradients(config, Recompute::kSelective, /*head_chunk=*/1);
  }
}
TEST(TransformerGradients, Sinks) {
  for (const ModelConfig& config : ModelsWithSinks()) {
    CheckModelGradients(config);
    CheckModelGradients(config, Recompute::kFull, 0, "sinks");
    CheckModelGradients(config, Recompute::kSelective, /*head_chunk=*/1, "sinks");
    CheckModelGradients(config, Recompute::kSequence, 0, "sinks");
  }
}
TEST(TransformerGradients, Recomputed) {
  CheckModelGradients(SmallLlama(true), Recompute::kFull);
  CheckModelGradients(SmallQwen(true), Recompute::kFull);
  CheckModelGradients(SmallGpt2(0.3), Recompute::kSelective);
}

struct LossAndGradients {
  double loss;
  Values gradients;
};

LossAndGradients Step(const Transformer& model, BurstAttention& attention,
                      const SequenceBatch& batch, double loss_scale) {
  DropoutKey dropout;
  dropout.enabled = true;
  Tape tape;
  const Variable loss = model.Loss(tape, attention, batch, loss_scale, dropout);
  EXPECT_TRUE(tape.Backward(loss).ok()) << tape.status();
  return {loss.value().ToVector<double>()[0], model.parameters().grads().ToVector<double>()};
}

TEST(TransformerGradients, FloatAgreesWithDouble) {
  ScopedThreadPool pool(2);
  for (const ModelConfig& config : {SmallLlama(false), SmallQwen(), SmallGpt2(0.3)}) {
    const auto model32 = MakeModel(config, DType::kFloat32);
    const auto model64 = MakeModel(config, DType::kFloat64);
    model64->parameters().values().CopyFrom(model32->parameters().values().To(DType::kFloat64));
    SingleRank single(RandomText(config.vocab, true));
    const auto actual = Step(*model32, *single.attention, single.batch, 0.1);
    const auto expected = Step(*model64, *single.attention, single.batch, 0.1);
    // Some dozen roundings in a row, each amplified at most by the size of the logits.
    const double tolerance = 100 * std::numeric_limits<float>::epsilon();
    EXPECT_NEAR(actual.loss, expected.loss, tolerance * expected.loss);
    ExpectClose(actual.gradients, expected.gradients, tolerance);
  }
}

TEST(TransformerGradients, AccumulateOverTapes) {
  const auto model = MakeModel(SmallLlama(true));
  SingleRank single(RandomText(13, false));
  const Values once = Step(*model, *single.attention, single.batch, 1).gradients;
  const Values twice = Step(*model, *single.attention, single.batch, 1).gradients;
  Values expected = once;
  for (double& value : expected) value *= 2;
  ExpectClose(twice, expected, kDoubleTolerance);
  model->parameters().ZeroGrad();
  EXPECT_EQ(Step(*model, *single.attention, single.batch, 1).gradients, once);
}

// --- what depends on what
// -------------------------------------------------------------------------

TEST(Transformer, LaterTokensDoNotChangeEarlierLogits) {
  for (const ModelConfig& config : {SmallLlama(false), SmallGpt2()}) {
    const auto model = MakeModel(config);
    Text text = RandomText(config.vocab, false);
    const Values before = Logits(*model, text);
    const int64_t changed = 5;
    text.tokens[changed] = (text.tokens[changed] + 1) % config.vocab;  // of row 0
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

// --- generation
// -----------------------------------------------------------------------------------

Tensor TokensOf(const Text& text, int64_t begin, int64_t n) {
  std::vector<int32_t> tokens;
  for (int64_t row = 0; row < text.batch; ++row) {
    const auto first = text.tokens.begin() + row * text.length + begin;
    tokens.insert(tokens.end(), first, first + n);
  }
  return Tensor::FromVector(tokens, {text.batch, n});
}

void ExpectDecodeEqualsForward(const ModelConfig& config, int64_t length, int64_t window) {
  const auto model = MakeModel(config);
  const Text text = RandomText(config.vocab, false, length);
  const Values all = Logits(*model, text, window);
  KvCache cache(config, text.batch, DType::kFloat64, window, kTestDevice);
  const auto expect_equal = [&](const Tensor& logits) {
    Values expected;
    for (int64_t row = 0; row < text.batch; ++row) {
      const auto begin = all.begin() + (row * length + cache.length() - 1) * config.vocab;
      expected.insert(expected.end(), begin, begin + config.vocab);
    }
    ExpectClose(logits.ToVector<double>(), expected, kDoubleTolerance);
  };
  expect_equal(*model->Decode(cache, TokensOf(text, 0, 3)));  // prefill
  expect_equal(*model->Decode(cache, TokensOf(text, 3, 2)));  // a few at once
  while (cache.length() < length) {
    expect_equal(*model->Decode(cache, TokensOf(text, cache.length(), 1)));
  }
}

TEST(Decode, EqualsForward) {
  ExpectDecodeEqualsForward(SmallLlama(false), 70, 0);  // past the cache's first capacity
  ExpectDecodeEqualsForward(SmallLlama(true), 20, 5);
  ExpectDecodeEqualsForward(SmallQwen(), 20, 5);
  ExpectDecodeEqualsForward(SmallGpt2(), 12, 0);
  for (const ModelConfig& config : ModelsOfChangedScores()) {
    ExpectDecodeEqualsForward(config, 12, 5);
  }
  for (const ModelConfig& config : ModelsWithSinks()) ExpectDecodeEqualsForward(config, 12, 5);
}

TEST(Decode, AModelWithoutGradientsHasTheSameBits) {
  const bool cuda = kTestDevice == DeviceType::kCuda;
  const DType dtype = cuda ? DType::kBFloat16 : DType::kFloat32;
  ModelConfig config;
  config.layers = 2;
  config.width = 64;
  config.heads = 4;
  config.kv_heads = 2;
  config.ffn = 96;
  config.vocab = 40;
  const Text text = RandomText(config.vocab, false, 12);
  const auto logits = [&](const StateSharding& sharding) {
    const auto model =
        Transformer::Create(config, dtype, /*seed=*/3, kTestDevice, /*parallel=*/{}, sharding);
    EXPECT_TRUE(model.ok()) << model.status();
    const ParameterList& parameters = (*model)->parameters();
    const ParameterList::KeptBytes kept = parameters.kept_bytes();
    EXPECT_EQ(kept.values, parameters.numel() * SizeOf(dtype));
    EXPECT_EQ(kept.gradients + kept.optimizer == 0, sharding.values_alone);
    EXPECT_EQ(parameters.variable(0).requires_grad(), !sharding.values_alone);
    (*model)->set_ffn_chunk(5);
    KvCache cache(config, text.batch, dtype, /*window=*/0, kTestDevice);
    Values all = (*model)->Decode(cache, TokensOf(text, 0, 11))->ToVector<double>();
    const Values last = (*model)->Decode(cache, TokensOf(text, 11, 1))->ToVector<double>();
    all.insert(all.end(), last.begin(), last.end());
    return all;
  };
  EXPECT_EQ(logits(StateSharding::ValuesAlone()), logits({}));
}

// Ranks that share the cache: a prefill over all of them, then tokens one or a few at a time. Every
// rank has one rank's logits, and all have the same bits; each keeps its part of the tokens.
void ExpectSharedCache(const ModelConfig& config, Layout layout, int ranks, int64_t prompt,
                       int64_t window) {
  SCOPED_TRACE(testing::Message() << Name(layout) << ", " << ranks << " ranks, prompt of " << prompt
                                  << ", window " << window);
  const int64_t length = prompt + 9;
  const Text text = RandomText(config.vocab, false, length);
  const Values all = Logits(*MakeModel(config), text, window);
  const auto expect_equal = [&](const Tensor& logits, int64_t position) {
    Values expected;
    for (int64_t row = 0; row < text.batch; ++row) {
      const auto begin = all.begin() + (row * length + position) * config.vocab;
      expected.insert(expected.end(), begin, begin + config.vocab);
    }
    ExpectClose(logits.ToVector<double>(), expected, kDoubleTolerance);
  };
  Text beginning = text;
  beginning.length = prompt;
  beginning.tokens = TokensOf(text, 0, prompt).ToVector<int32_t>();
  beginning.positions.clear();
  for (int64_t i = 0; i < text.batch * prompt; ++i) {
    beginning.positions.push_back(static_cast<int32_t>(i % prompt));
  }
  beginning.targets.assign(text.batch * prompt, -1);
  std::vector<Values> last(ranks);
  std::vector<int64_t> tokens(ranks);
  const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BurstAttentionOptions options;
    options.layout = layout;
    options.mask.window = window;
    options.scores.softcap = config.attention_softcap;
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(RingSchedule schedule, attention->Schedule(prompt));
    const auto own = MakeModel(config);
    KvCache cache(config, text.batch, DType::kFloat64, window, kTestDevice, &comm);
    const SequenceBatch batch = Cut(beginning, std::make_shared<RingSchedule>(std::move(schedule)));
    BURST_ASSIGN_OR_RETURN(const Tensor first, own->NextTokenLogits(*attention, batch, &cache));
    if (!first.null()) expect_equal(first, prompt - 1);
    for (const int64_t n : {1, 1, 3, 1, 2, 1}) {
      const int64_t begin = cache.length();
      BURST_ASSIGN_OR_RETURN(const Tensor next, own->Decode(cache, TokensOf(text, begin, n)));
      expect_equal(next, begin + n - 1);
      last[comm.rank()] = next.ToVector<double>();
    }
    EXPECT_EQ(cache.length(), length);
    const Tensor none = Tensor::Empty(
        {text.batch, 0, config.WithDefaults().kv_heads, config.WithDefaults().head_dim},
        DType::kFloat64, kTestDevice);
    tokens[comm.rank()] = cache.Append(0, none, none).k.dim(1);
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  for (const Values& logits : last) EXPECT_EQ(logits, last[0]);
  EXPECT_EQ(std::accumulate(tokens.begin(), tokens.end(), int64_t{0}), length);
  const auto [fewest, most] = std::minmax_element(tokens.begin(), tokens.end());
  EXPECT_LE(*most - *fewest, 3) << "as many as came at once";
}

TEST(Decode, RanksShareTheCache) {
  for (const Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kBalanced}) {
    ExpectSharedCache(SmallLlama(false), layout, 2, 20, 0);
    ExpectSharedCache(SmallLlama(true), layout, 3, 70, 0);
    ExpectSharedCache(SmallQwen(), layout, 4, 11, 6);
    ExpectSharedCache(SmallGpt2(), layout, 3, 3, 0);
    ExpectSharedCache(ModelsWithSinks()[0], layout, 3, 20, 0);
    if (kTestDevice == DeviceType::kCpu) {
      ExpectSharedCache(ModelsOfChangedScores()[0], layout, 3, 20, 0);
    }
    ExpectSharedCache(SmallLlama(false), layout, 4, 2, 3);  // ranks without a token
  }
}

TEST(Decode, Gpt2StopsAtItsContext) {
  const ModelConfig config = SmallGpt2();
  const auto model = MakeModel(config);
  const Text text = RandomText(config.vocab, false, 13);
  KvCache cache(config, text.batch, DType::kFloat64, /*window=*/0, kTestDevice);
  ASSERT_TRUE(model->Decode(cache, TokensOf(text, 0, 11)).ok());
  const auto refused = model->Decode(cache, TokensOf(text, 11, 2));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(cache.length(), 11);
  EXPECT_TRUE(model->Decode(cache, TokensOf(text, 11, 1)).ok());
}

// --- rings
// ----------------------------------------------------------------------------------------

// The sum over the ranks of losses and gradients is that of one rank, dropout and packed documents
// included, also with fewer tokens than ranks.
void ExpectRanksAgree(const ModelConfig& config, Layout layout, int ranks, int64_t length) {
  const Text text = RandomText(config.vocab, /*packed=*/length > 5, length);
  const auto model = MakeModel(config);
  SingleRank single(text, /*window=*/0, ScoresOf(config));
  const LossAndGradients expected = Step(*model, *single.attention, single.batch, 0.1);

  LossAndGradients sum{0, Values(expected.gradients.size(), 0)};
  std::mutex mutex;
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BurstAttentionOptions options;
    options.layout = layout;
    options.scores = ScoresOf(config);
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(RingSchedule schedule, attention->Schedule(text.length, text.documents));
    const auto own = MakeModel(config);
    const SequenceBatch batch = Cut(text, std::make_shared<RingSchedule>(std::move(schedule)));
    const LossAndGradients part = Step(*own, *attention, batch, 0.1);
    std::lock_guard<std::mutex> lock(mutex);
    sum.loss += part.loss;
    for (size_t i = 0; i < sum.gradients.size(); ++i) sum.gradients[i] += part.gradients[i];
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_NEAR(sum.loss, expected.loss, kDoubleTolerance * expected.loss);
  ExpectClose(sum.gradients, expected.gradients, kDoubleTolerance);
}

TEST(Ranks, LossAndGradientsAreThoseOfOneRank) {
  for (const Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kBalanced}) {
    for (const int ranks : {2, 3}) {
      ExpectRanksAgree(SmallLlama(false), layout, ranks, 9);
      ExpectRanksAgree(SmallQwen(), layout, ranks, 9);
      ExpectRanksAgree(SmallGpt2(0.3), layout, ranks, 9);
      for (const ModelConfig& config : ModelsOfChangedScores()) {
        ExpectRanksAgree(config, layout, ranks, 9);
      }
      for (const ModelConfig& config : ModelsWithSinks()) {
        ExpectRanksAgree(config, layout, ranks, 9);
      }
    }
    ExpectRanksAgree(SmallLlama(true), layout, /*ranks=*/4, /*length=*/3);
    ExpectRanksAgree(SmallGpt2(0.3), layout, /*ranks=*/4, /*length=*/3);
  }
}

// The prefill of a prompt: one rank has the logits, those of the last token.
void ExpectNextTokenLogits(const ModelConfig& config, Layout layout, int ranks) {
  const Text text = RandomText(config.vocab, /*packed=*/false);
  const auto model = MakeModel(config);
  KvCache cache(config, text.batch, DType::kFloat64, /*window=*/0, kTestDevice);
  const Values expected = model->Decode(cache, TokensOf(text, 0, text.length))->ToVector<double>();
  std::vector<Values> logits(ranks);
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BurstAttentionOptions options;
    options.layout = layout;
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(RingSchedule schedule, attention->Schedule(text.length));
    const auto own = MakeModel(config);
    const SequenceBatch batch = Cut(text, std::make_shared<RingSchedule>(std::move(schedule)));
    BURST_ASSIGN_OR_RETURN(const Tensor result, own->NextTokenLogits(*attention, batch));
    if (!result.null()) logits[comm.rank()] = result.ToVector<double>();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  int found = 0;
  for (const Values& values : logits) {
    if (values.empty()) continue;
    ExpectClose(values, expected, kDoubleTolerance);
    ++found;
  }
  EXPECT_EQ(found, 1);
}

TEST(Ranks, NextTokenLogitsAreThoseOfDecode) {
  for (const Layout layout :
       {Layout::kContiguous, Layout::kZigzag, Layout::kStriped, Layout::kBalanced}) {
    for (const int ranks : {1, 2, 12}) {
      ExpectNextTokenLogits(SmallLlama(false), layout, ranks);
      ExpectNextTokenLogits(SmallGpt2(), layout, ranks);
    }
  }
}

}  // namespace
}  // namespace burst
