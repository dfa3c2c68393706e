// Whole models: against a naive forward written without the library, gradients of every parameter,
// what may depend on what, generation, and rings of several ranks.
#include "model/transformer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/autograd/tape.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/thread_communicator.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/kv_cache.h"
#include "model/ops/dropout.h"
#include "tests/gradient_check.h"

namespace burst {
namespace {

using Values = std::vector<double>;

ModelConfig SmallLlama(bool tied) {
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

ModelConfig SmallGpt2(double dropout = 0) {
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

// Initial values are too close to zero (and biases exactly there) to tell mistakes from rounding.
std::unique_ptr<Transformer> MakeModel(const ModelConfig& config, DType dtype = DType::kFloat64) {
  auto model = Transformer::Create(config, dtype, /*seed=*/3);
  EXPECT_TRUE(model.ok()) << model.status();
  const Tensor& values = (*model)->parameters().values();
  values.Add(RandomTensor(values.shape(), 5, 0.3, dtype));
  return *std::move(model);
}

// A whole batch, before it is cut for the ranks of a ring.
struct Text {
  int64_t batch = 2;
  int64_t length = 9;
  std::vector<int32_t> tokens, positions, targets;  // [batch, length]
  DocumentStarts documents;
};

Text RandomText(int64_t vocab, bool packed, int64_t length = 9) {
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

// The part of the text that lies at `positions` of the sequence.
SequenceBatch Cut(const Text& text, std::shared_ptr<const RingSchedule> schedule) {
  const std::vector<int32_t>& positions = schedule->positions(schedule->rank());
  const int64_t length = static_cast<int64_t>(positions.size());
  const auto cut = [&](const std::vector<int32_t>& all) {
    std::vector<int32_t> part;
    for (int64_t row = 0; row < text.batch; ++row) {
      for (const int32_t position : positions) part.push_back(all[row * text.length + position]);
    }
    return Tensor::FromVector(part, {text.batch, length});
  };
  return {cut(text.tokens), cut(text.positions), cut(text.targets), std::move(schedule)};
}

struct SingleRank {
  explicit SingleRank(const Text& text, int64_t window = 0) {
    BurstAttentionOptions options;
    options.mask.window = window;
    attention = *BurstAttention::Create(options, nullptr);
    batch = Cut(text,
                std::make_shared<RingSchedule>(*attention->Schedule(text.length, text.documents)));
  }
  std::unique_ptr<BurstAttention> attention;
  SequenceBatch batch;
};

Values Logits(const Transformer& model, const Text& text, int64_t window = 0) {
  SingleRank single(text, window);
  Tape tape(/*recording=*/false);
  const Variable logits = model.Logits(tape, *single.attention, single.batch);
  EXPECT_TRUE(tape.status().ok()) << tape.status();
  return logits.value().ToVector<double>();
}

// --- a naive forward
// ------------------------------------------------------------------------------
//
// One token at a time, plain loops, no code of the library but the parameters' names and numbers.

class Naive {
 public:
  // mask(site): the factors [batch, length, width] that dropout applies at a site; none by default.
  Naive(const Transformer& model, const Text& text, std::function<Values(int64_t)> mask = nullptr)
      : config_(model.config()), text_(text), mask_(std::move(mask)) {
    for (const Parameter& parameter : model.parameters().all()) {
      parameters_[parameter.name] = parameter.variable.value().ToVector<double>();
    }
  }

  // [batch, length, vocab]
  Values Logits() {
    Values logits;
    for (int64_t row = 0; row < text_.batch; ++row) {
      std::vector<Values> x;  // [length][width]
      for (int64_t t = 0; t < text_.length; ++t) {
        x.push_back(Row("embedding.tokens", text_.tokens[row * text_.length + t]));
        if (gpt2()) Accumulate(x[t], Row("embedding.positions", Position(row, t)));
        x[t] = Drop(0, row, t, x[t]);
      }
      for (int64_t layer = 0; layer < config_.layers; ++layer) Layer(layer, row, x);
      for (int64_t t = 0; t < text_.length; ++t) {
        const Values h = Norm("final_norm", x[t]);
        const Values& head =
            parameters_[config_.tied_embeddings ? "embedding.tokens" : "head.weight"];
        for (int64_t v = 0; v < config_.vocab; ++v) {
          double sum = 0;
          for (int64_t i = 0; i < config_.width; ++i) sum += head[v * config_.width + i] * h[i];
          logits.push_back(sum);
        }
      }
    }
    return logits;
  }

 private:
  bool gpt2() const { return config_.family == Family::kGpt2; }
  int32_t Position(int64_t row, int64_t t) { return text_.positions[row * text_.length + t]; }
  Values Row(const std::string& table, int64_t row) {
    const auto begin = parameters_[table].begin() + row * config_.width;
    return Values(begin, begin + config_.width);
  }
  static void Accumulate(Values& x, const Values& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  Values Drop(int64_t site, int64_t row, int64_t t, Values x) {
    if (mask_ == nullptr) return x;
    const Values mask = mask_(site);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= mask[(row * text_.length + t) * x.size() + i];
    return x;
  }

  Values Project(const std::string& name, const Values& x) {
    const Values& weight = parameters_[name + ".weight"];
    Values y(weight.size() / x.size(), 0);
    for (size_t o = 0; o < y.size(); ++o) {
      for (size_t i = 0; i < x.size(); ++i) y[o] += weight[o * x.size() + i] * x[i];
    }
    if (gpt2()) Accumulate(y, parameters_[name + ".bias"]);
    return y;
  }

  Values Norm(const std::string& name, const Values& x) {
    double mean = 0, square = 0;
    for (double v : x) mean += gpt2() ? v / x.size() : 0;
    for (double v : x) square += (v - mean) * (v - mean) / x.size();
    Values y;
    for (size_t i = 0; i < x.size(); ++i) {
      y.push_back((x[i] - mean) / std::sqrt(square + config_.norm_eps) *
                  parameters_[name + ".weight"][i]);
      if (gpt2()) y[i] += parameters_[name + ".bias"][i];
    }
    return y;
  }

  void Turn(Values& x, int32_t position) {  // RoPE, as complex products
    const int64_t d = config_.width / config_.heads;
    for (size_t head = 0; head < x.size() / d; ++head) {
      for (int64_t i = 0; i < d / 2; ++i) {
        const double angle = position / std::pow(config_.rope_theta, 2.0 * i / d);
        double& re = x[head * d + i];
        double& im = x[head * d + d / 2 + i];
        const double turned = re * std::cos(angle) - im * std::sin(angle);
        im = re * std::sin(angle) + im * std::cos(angle);
        re = turned;
      }
    }
  }

  void Layer(int64_t layer, int64_t row, std::vector<Values>& x) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    std::vector<Values> q, k, v;
    for (int64_t t = 0; t < text_.length; ++t) {
      const Values h = Norm(prefix + "attention_norm", x[t]);
      const Values qkv = Project(prefix + "attention.qkv", h);
      const auto keys = qkv.begin() + config_.width;
      const auto values = keys + config_.kv_heads * config_.width / config_.heads;
      q.emplace_back(qkv.begin(), keys);
      k.emplace_back(keys, values);
      v.emplace_back(values, qkv.end());
      if (!gpt2()) Turn(q[t], Position(row, t));
      if (!gpt2()) Turn(k[t], Position(row, t));
    }
    const int64_t d = config_.width / config_.heads;
    for (int64_t t = 0; t < text_.length; ++t) {
      Values attended(config_.width, 0);
      for (int64_t head = 0; head < config_.heads; ++head) {
        const int64_t kv_head = head * config_.kv_heads / config_.heads;
        Values weights;
        double total = 0;
        for (int64_t s = t - Position(row, t); s <= t; ++s) {  // from the document's start
          double score = 0;
          for (int64_t i = 0; i < d; ++i) score += q[t][head * d + i] * k[s][kv_head * d + i];
          weights.push_back(std::exp(score / std::sqrt(double(d))));
          total += weights.back();
        }
        for (size_t j = 0; j < weights.size(); ++j) {
          for (int64_t i = 0; i < d; ++i) {
            attended[head * d + i] +=
                weights[j] / total * v[t - Position(row, t) + j][kv_head * d + i];
          }
        }
      }
      Accumulate(x[t], Drop(1 + 2 * layer, row, t, Project(prefix + "attention.out", attended)));
      const Values h = Norm(prefix + "ffn_norm", x[t]);
      Values up = Project(prefix + (gpt2() ? "ffn.up" : "ffn.gate_up"), h);
      if (gpt2()) {
        for (double& u : up) {
          u *= 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
        }
      } else {
        const Values gate(up.begin(), up.begin() + config_.ffn);
        up.erase(up.begin(), up.begin() + config_.ffn);
        for (size_t i = 0; i < up.size(); ++i) up[i] *= gate[i] / (1 + std::exp(-gate[i]));
      }
      Accumulate(x[t], Drop(2 + 2 * layer, row, t, Project(prefix + "ffn.down", up)));
    }
  }

  const ModelConfig config_;
  const Text& text_;
  const std::function<Values(int64_t)> mask_;
  std::map<std::string, Values> parameters_;
};

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
        ExpectClose(Logits(*model, text), Naive(*model, text).Logits(), kDoubleTolerance);
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
      ExpectClose(Logits(*model, text), Naive(*model, text).Logits(), kDoubleTolerance);
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
      site.positions =
          Tensor::FromVector(single.batch.schedule->positions(/*rank=*/0), {text.length});
      Tensor ones = Tensor::Empty({text.batch, text.length, config.width}, DType::kFloat64);
      ones.Fill(1);
      Tape tape(false);
      return Dropout(tape, Variable(ones), site).value().ToVector<double>();
    };
    const double expected = LossOf(Naive(*model, text, mask).Logits(), text);
    Tape tape(false);
    const Variable loss = model->Loss(tape, *single.attention, single.batch, 1, key);
    EXPECT_NEAR(loss.value().ToVector<double>()[0], expected, kDoubleTolerance * expected);
  }
}

// --- gradients
// ------------------------------------------------------------------------------------

void CheckModelGradients(const ModelConfig& config) {
  const auto model = MakeModel(config);
  const Text text = RandomText(config.vocab, /*packed=*/true, /*length=*/6);
  SingleRank single(text);
  DropoutKey dropout;
  dropout.enabled = true;
  std::vector<NamedLeaf> leaves;
  for (const Parameter& parameter : model->parameters().all()) {
    leaves.push_back({parameter.name, parameter.variable});
  }
  // Norms over a dozen channels have large higher derivatives: a smaller step.
  const auto loss = [&](Tape& tape) -> std::vector<Variable> {
    return {model->Loss(tape, *single.attention, single.batch, 0.1, dropout)};
  };
  CheckGradients(leaves, loss, /*samples=*/0, kGradientTolerance, /*h=*/2e-4);
}

TEST(TransformerGradients, LlamaUntied) { CheckModelGradients(SmallLlama(false)); }
TEST(TransformerGradients, LlamaTied) { CheckModelGradients(SmallLlama(true)); }
TEST(TransformerGradients, Gpt2WithDropout) { CheckModelGradients(SmallGpt2(0.3)); }

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
  for (const ModelConfig& config : {SmallLlama(false), SmallGpt2(0.3)}) {
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
  KvCache cache(config, text.batch, DType::kFloat64, window);
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
  ExpectDecodeEqualsForward(SmallGpt2(), 12, 0);
}

TEST(Decode, Gpt2StopsAtItsContext) {
  const ModelConfig config = SmallGpt2();
  const auto model = MakeModel(config);
  const Text text = RandomText(config.vocab, false, 13);
  KvCache cache(config, text.batch, DType::kFloat64);
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
  SingleRank single(text);
  const LossAndGradients expected = Step(*model, *single.attention, single.batch, 0.1);

  LossAndGradients sum{0, Values(expected.gradients.size(), 0)};
  std::mutex mutex;
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BurstAttentionOptions options;
    options.layout = layout;
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
  for (const Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    for (const int ranks : {2, 3}) {
      ExpectRanksAgree(SmallLlama(false), layout, ranks, 9);
      ExpectRanksAgree(SmallGpt2(0.3), layout, ranks, 9);
    }
    ExpectRanksAgree(SmallLlama(true), layout, /*ranks=*/4, /*length=*/3);
    ExpectRanksAgree(SmallGpt2(0.3), layout, /*ranks=*/4, /*length=*/3);
  }
}

// --- parameters
// -----------------------------------------------------------------------------------

TEST(Parameters, CountsOfPublishedModels) {
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d12")), 124439808);
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d24")), 354823168);
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d36")), 774030080);
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("d48")), 1557611200);
  // Per layer: query and out of width^2, key and value of width * 8 heads * 128, three matrices of
  // width * ffn and two norms; a last norm, embedding and head.
  const int64_t layer = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 8192 + 2 * 2048;
  EXPECT_EQ(*Transformer::CountParameters(*ModelPreset("llama_1b")),
            16 * layer + 2048 + 2 * 32000 * 2048);
}

TEST(Parameters, FlopsPerToken) {
  ModelConfig config = *ModelPreset("nanogpt_cpu");
  config.vocab = 65;
  config.context = 64;
  const auto model = *Transformer::Create(config, DType::kFloat32, 1);
  const double products = 4 * (4 * 128 * 128 + 2 * 128 * 512) + 65 * 128;
  EXPECT_EQ(model->TrainingFlopsPerToken(64).full, 6 * products + 12.0 * 4 * 128 * 64);
  EXPECT_EQ(model->TrainingFlopsPerToken(64).causal, 6 * products + 6.0 * 4 * 128 * 64);
}

TEST(Parameters, InitialValues) {
  ModelConfig config = *ModelPreset("nanogpt_cpu");
  config.vocab = 65;
  config.context = 64;
  const auto model = *Transformer::Create(config, DType::kFloat32, 1);
  for (const Parameter& p : model->parameters().all()) {
    const Values values = p.variable.value().ToVector<double>();
    const double n = values.size();
    double mean = 0, square = 0;
    for (double v : values) mean += v / n;
    for (double v : values) square += (v - mean) * (v - mean) / n;
    const bool is_norm = p.name.find("norm") != std::string::npos;
    const bool is_bias = p.name.find(".bias") != std::string::npos;
    EXPECT_EQ(p.decay, !is_norm && !is_bias) << p.name;
    if (is_norm || is_bias) {
      EXPECT_EQ(mean, is_bias ? 0 : 1) << p.name;
      EXPECT_EQ(square, 0) << p.name;
      continue;
    }
    const bool residual = p.name.find("attention.out") != std::string::npos ||
                          p.name.find("ffn.down") != std::string::npos;
    const double std = residual ? 0.02 / std::sqrt(8) : 0.02;
    // Five standard deviations of the estimates from n normals.
    EXPECT_NEAR(mean, 0, 5 * std / std::sqrt(n)) << p.name;
    EXPECT_NEAR(std::sqrt(square), std, 5 * std / std::sqrt(2 * n)) << p.name;
  }
}

TEST(Parameters, InitialValuesDependOnTheSeedAlone) {
  const auto values = [](DType dtype, uint64_t seed, int threads) {
    ScopedThreadPool pool(threads);
    return (*Transformer::Create(SmallLlama(false), dtype, seed))
        ->parameters()
        .values()
        .To(DType::kFloat32)
        .ToVector<float>();
  };
  EXPECT_EQ(values(DType::kFloat32, 1, 1), values(DType::kFloat64, 1, 2));
  EXPECT_NE(values(DType::kFloat32, 1, 1), values(DType::kFloat32, 2, 1));
}

TEST(Parameters, InitialLossIsNearLogVocab) {
  for (const char* preset : {"nanogpt_cpu", "llama_tiny"}) {
    ModelConfig config = *ModelPreset(preset);
    config.vocab = 65;
    config.context = 64;
    const auto model = *Transformer::Create(config, DType::kFloat32, 1);
    SingleRank single(RandomText(config.vocab, false, 64));
    int64_t count = 0;
    for (const int32_t target : single.batch.targets.ToVector<int32_t>()) count += target >= 0;
    Tape tape(false);
    const double loss =
        model->Loss(tape, *single.attention, single.batch, 1.0 / count, DropoutKey())
            .value()
            .ToVector<double>()[0];
    // Logits are normal with std s = 0.02 sqrt(width): the expected loss is log(vocab) + s^2 / 2,
    // the mean over `count` tokens scatters by s / sqrt(count).
    const double s = 0.02 * std::sqrt(double(config.width));
    EXPECT_NEAR(loss, std::log(65.0) + s * s / 2, 5 * s / std::sqrt(count)) << preset;
  }
}

TEST(Parameters, IncompleteConfigsAreErrors) {
  ModelConfig config = SmallLlama(false);
  config.vocab = 0;
  EXPECT_EQ(Transformer::Create(config, DType::kFloat32, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  config = SmallGpt2();
  config.context = 0;
  EXPECT_EQ(Transformer::Create(config, DType::kFloat32, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  config = SmallGpt2();
  config.heads = 5;
  EXPECT_EQ(Transformer::Create(config, DType::kFloat32, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace burst
