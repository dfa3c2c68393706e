// Tests generation. Token by token it gives the whole model's logits, alone and with a KV cache
// that ranks share.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/kv_cache.h"
#include "model/transformer.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/model_checks.h"
#include "tests/model/small_models.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

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
  ExpectDecodeEqualsForward(SmallPhi(), 20, 0);
  ExpectDecodeEqualsForward(SmallLayered(), 20, 5);
  for (const ModelConfig& config : ModelsOfOtherNorms()) ExpectDecodeEqualsForward(config, 20, 5);
  ExpectDecodeEqualsForward(SmallGpt2(), 12, 0);
  for (const ModelConfig& config : ModelsOfChangedScores()) {
    ExpectDecodeEqualsForward(config, 12, 5);
  }
  for (const ModelConfig& config : ModelsWithSinks()) ExpectDecodeEqualsForward(config, 12, 5);
}

TEST(Decode, AModelOfValuesAloneHasTheSameBits) {
  constexpr DType dtype = DType::kBFloat16;
  ModelConfig config = SmallLlama(false);
  config.width = 64;  // heads of 16, for kernels of 16 bits
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
    ExecutionPlan plan;
    plan.ffn_chunk = 5;
    (*model)->SetExecution(plan);
    KvCache cache(config, text.batch, dtype, /*window=*/0, kTestDevice);
    Values all = (*model)->Decode(cache, TokensOf(text, 0, 11))->ToVector<double>();
    const Values last = (*model)->Decode(cache, TokensOf(text, 11, 1))->ToVector<double>();
    all.insert(all.end(), last.begin(), last.end());
    return all;
  };
  EXPECT_EQ(logits(StateSharding::ValuesAlone()), logits({}));
}

// Ranks share the cache. They make a prefill, then take one or a few tokens at a time. Every rank
// has the logits of a run with one rank, and all have the same bits. Each keeps its part of the
// tokens.
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
    options.scores.softcap = config.attention_softcap;
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                           SchedulesOf(config, *attention, beginning, window));
    const auto own = MakeModel(config);
    KvCache cache(config, text.batch, DType::kFloat64, window, kTestDevice, &comm);
    const SequenceBatch batch = Cut(beginning, schedules);
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
    ExpectSharedCache(SmallLayered(), layout, 3, 11, 6);
    ExpectSharedCache(SmallPhi(), layout, 3, 11, 0);
    ExpectSharedCache(SmallOlmo(), layout, 2, 11, 6);
    ExpectSharedCache(SmallGemma(), layout, 3, 11, 6);
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

// The cache keeps the keys of a short text. The longer text has other angles, so it is read again.
TEST(Decode, StopsWhereATextBecomesLong) {
  ModelConfig config = SmallPhi();
  config.rope_scaling.first_context = 11;
  const auto model = MakeModel(config);
  const Text text = RandomText(config.vocab, false, 13);
  KvCache cache(config, text.batch, DType::kFloat64, /*window=*/0, kTestDevice);
  ASSERT_TRUE(model->Decode(cache, TokensOf(text, 0, 10)).ok());
  ASSERT_TRUE(model->Decode(cache, TokensOf(text, 10, 1)).ok());
  const auto refused = model->Decode(cache, TokensOf(text, 11, 1));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(cache.length(), 11);
  cache.Clear();
  ASSERT_TRUE(model->Decode(cache, TokensOf(text, 0, 12)).ok());
  const auto last = model->Decode(cache, TokensOf(text, 12, 1));
  ASSERT_TRUE(last.ok()) << last.status();
  const Values all = Logits(*model, text, 0), logits = last->ToVector<double>();
  Values expected;
  for (int64_t row = 0; row < text.batch; ++row) {
    const auto begin = all.begin() + (row * 13 + 12) * config.vocab;
    expected.insert(expected.end(), begin, begin + config.vocab);
  }
  ExpectClose(logits, expected, kDoubleTolerance);
}

// Checks the prefill of a prompt. One rank has the logits of the last token.
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
    BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules, SchedulesOf(config, *attention, text));
    const auto own = MakeModel(config);
    const SequenceBatch batch = Cut(text, schedules);
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

TEST(Decode, TheNextTokensLogitsOfRanks) {
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
