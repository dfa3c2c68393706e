// Tests the backward of whole models: gradients of every parameter against central differences, and
// rings of ranks against one rank.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
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
#include "model/ops/ops.h"
#include "model/transformer.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/model_checks.h"
#include "tests/model/small_models.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

// Checks the gradients of the parameters whose names contain `part`.
void CheckModelGradients(const ModelConfig& config, Recompute recompute = Recompute::kNone,
                         int64_t head_chunk = 0, const std::string& part = "", int64_t window = 0) {
  const auto model = MakeModel(config);
  ExecutionPlan plan;
  plan.recompute = recompute;
  plan.head_chunk = head_chunk;
  model->SetExecution(plan);
  const Text text = RandomText(config.vocab, /*packed=*/true, /*length=*/6);
  SingleRank single(text, window, config);
  DropoutKey dropout;
  dropout.enabled = true;
  std::vector<NamedLeaf> leaves;
  for (const Parameter& parameter : model->parameters().all()) {
    if (parameter.name.find(part) == std::string::npos) continue;
    leaves.push_back({parameter.name, parameter.variable});
  }
  // Normalization over a dozen channels has large higher derivatives, so the step is smaller.
  const auto loss = [&](Tape& tape) -> std::vector<Variable> {
    return {model->Loss(tape, *single.attention, single.batch, 0.1, dropout)};
  };
  CheckGradients(leaves, loss, /*samples=*/0, kGradientTolerance, /*h=*/2e-4);
}

TEST(TransformerGradients, LlamaUntied) { CheckModelGradients(SmallLlama(false)); }
TEST(TransformerGradients, LlamaTied) { CheckModelGradients(SmallLlama(true)); }
TEST(TransformerGradients, Qwen) { CheckModelGradients(SmallQwen()); }
TEST(TransformerGradients, PartialRotationAndLongRope) {
  CheckModelGradients(SmallPhi());
  CheckModelGradients(SmallPhi(), Recompute::kFull, 0, "attention");
  CheckModelGradients(SmallPhi(), Recompute::kSelective, /*head_chunk=*/1, "attention");
  CheckModelGradients(SmallPhi(), Recompute::kSequence, 0, "attention");
}
TEST(TransformerGradients, LayersOfTheirOwnWindows) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull, Recompute::kSequence}) {
    CheckModelGradients(SmallLayered(), recompute, 0, "attention", /*window=*/2);
  }
}
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
TEST(TransformerGradients, OtherNorms) {
  for (const ModelConfig& config : ModelsOfOtherNorms()) {
    CheckModelGradients(config);
    CheckModelGradients(config, Recompute::kFull, 0, "norm");
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
    // The error is some dozen roundings in a row, each multiplied at most by the size of the
    // logits.
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

// Losses and gradients, summed over the ranks, equal one rank's. This includes dropout, packed
// documents, and fewer tokens than ranks.
void ExpectRanksAgree(const ModelConfig& config, Layout layout, int ranks, int64_t length,
                      int64_t window = 0) {
  const Text text = RandomText(config.vocab, /*packed=*/length > 5, length);
  const auto model = MakeModel(config);
  SingleRank single(text, window, config);
  const LossAndGradients expected = Step(*model, *single.attention, single.batch, 0.1);

  LossAndGradients sum{0, Values(expected.gradients.size(), 0)};
  std::mutex mutex;
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BurstAttentionOptions options;
    options.layout = layout;
    options.scores = ScoresOf(config);
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                           SchedulesOf(config, *attention, text, window));
    const auto own = MakeModel(config);
    const SequenceBatch batch = Cut(text, schedules);
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
      ExpectRanksAgree(SmallPhi(), layout, ranks, 9);
      ExpectRanksAgree(SmallLayered(), layout, ranks, 9, /*window=*/2);
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

// A ring sends for a layer with a window only what the window needs.
TEST(Ranks, EachLayerSendsWhatItsOwnWindowNeeds) {
  constexpr int kRanks = 4;
  // Returns the bytes, forward and backward, that all ranks send in a step of a model with these
  // full_layers.
  const auto bytes = [](const std::vector<int64_t>& full_layers) {
    ModelConfig config = SmallLayered();
    config.full_layers = full_layers;
    const Text text = RandomText(config.vocab, /*packed=*/false, /*length=*/64);
    std::atomic<int64_t> forward{0}, backward{0};
    const absl::Status status = RunRanks(kRanks, [&](Communicator& comm) -> absl::Status {
      BurstAttentionOptions options;
      options.layout = Layout::kContiguous;
      BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
      BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                             SchedulesOf(config, *attention, text, /*window=*/5));
      Step(*MakeModel(config), *attention, Cut(text, schedules), 0.1);
      forward += attention->bytes_sent().forward;
      backward += attention->bytes_sent().backward;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return std::pair(forward.load(), backward.load());
  };
  const ModelConfig config = SmallLayered();
  const int64_t channels = 2 * config.kv_heads * config.head_dim;  // of keys and values
  const int64_t token = channels * static_cast<int64_t>(sizeof(double));
  // Batches have two rows. Without a window the keys of rank r are sent to the 3 - r ranks behind
  // it; with one, four tokens before each of three borders are sent.
  const int64_t full = 2 * token * 16 * (3 + 2 + 1), windowed = 2 * token * 4 * 3;
  const auto none = bytes({}), one = bytes({1}), all = bytes({0, 1, 2});
  EXPECT_EQ(none.first, 3 * windowed);
  EXPECT_EQ(one.first, full + 2 * windowed);
  EXPECT_EQ(all.first, 3 * full);
  // In the backward, too, each layer sends by its own mask.
  EXPECT_EQ(3 * one.second, all.second + 2 * none.second);
  EXPECT_LT(2 * none.second, all.second);
}

}  // namespace
}  // namespace burst
