// Compares the gradients of whole models in bfloat16 with a naive computation in bfloat16, with
// double precision as the truth. A GPU's logits in float32 are compared with the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/autograd/tape.h"
#include "burst/base/philox.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/transformer.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

using Values = std::vector<double>;

constexpr int64_t kBatch = 4, kLength = 200;

// Makes the model of a family's name. "qwen" is llama with the additional fields of Qwen2 and
// Qwen3, "phi" with those of Phi-4-mini, and "olmo" with those of OLMo 2. "gemma" has those of
// Gemma 2 and 3.
ModelConfig Model(const std::string& name) {
  const Family family = name == "gpt2" ? Family::kGpt2 : Family::kLlama;
  ModelConfig config;
  config.family = family;
  if (name == "qwen") {
    config.head_dim = 40;
    config.qkv_bias = true;
    config.qk_norm = QkNorm::kHead;
    config.rope_scaling.kind = RopeScaling::Kind::kYarn;
    config.rope_scaling.factor = 4;
    config.rope_scaling.first_context = 64;
  }
  if (name == "phi") {
    config.rope_channels = 16;  // of 32
    config.rope_scaling.kind = RopeScaling::Kind::kLongRope;
    config.rope_scaling.factor = 4;
    config.rope_scaling.first_context = 64;
    config.rope_scaling.short_factors = {1, 1, 1, 1, 1, 1, 1, 1};
    config.rope_scaling.long_factors = {1, 1.1, 1.25, 1.5, 2, 3, 5, 9};
  }
  if (name == "olmo") {
    config.qk_norm = QkNorm::kAll;
    config.norm_position = NormPosition::kAfter;
  }
  if (name == "gemma") {
    config.head_dim = 40;
    config.qk_norm = QkNorm::kHead;
    config.norm_position = NormPosition::kBoth;
    config.unit_offset_norms = config.scaled_embedding = true;
    config.gate = Gate::kGelu;
    config.score_channels = 24;
    config.logits_softcap = 3;
    config.full_layers = {1};
    config.window_rope_theta = 500;
  }
  config.layers = 3;
  config.width = 128;
  config.heads = 4;
  config.kv_heads = family == Family::kLlama ? 2 : 4;
  config.ffn = 256;
  config.vocab = 131;
  config.context = kLength;
  config.tied_embeddings = family == Family::kGpt2 || name == "gemma";
  return config;
}

// Makes a model on `device`. Its weights are bfloat16 numbers, so that every computation starts
// from the same ones.
std::unique_ptr<Transformer> Make(const ModelConfig& config, DType dtype, DeviceType device) {
  auto model = Transformer::Create(config, dtype, /*seed=*/3, device);
  EXPECT_TRUE(model.ok()) << model.status();
  ParameterList& parameters = (*model)->parameters();
  Values values(parameters.numel());
  for (const Parameter& parameter : parameters.all()) {
    for (int64_t i = 0; i < parameter.numel(); ++i) {
      const PhiloxCounter bits = Philox(5, parameter.offset, i);
      // Biases and normalization weights also differ from their initial 0 and 1.
      const double spread = parameter.init_std > 0 ? parameter.init_std : 0.1;
      values[parameter.offset + i] =
          parameter.init_mean + spread * NormalFromBits(bits[0], bits[1])[0];
    }
  }
  const Tensor rounded =
      Tensor::FromVector(values, {parameters.numel()}, device).To(DType::kBFloat16);
  parameters.masters().CopyFrom(rounded.To(parameters.masters().dtype()));
  parameters.RoundMasters();
  return *std::move(model);
}

struct Problem {
  Problem(int64_t vocab, DeviceType device) {
    attention = *BurstAttention::Create({}, nullptr);
    std::vector<int32_t> tokens, positions, targets;
    for (int64_t row = 0; row < kBatch; ++row) {
      for (int32_t t = 0; t < kLength; ++t) {
        const PhiloxCounter bits = Philox(17, row, t);
        tokens.push_back(bits[0] % vocab);
        targets.push_back(bits[1] % vocab);
        positions.push_back(t);
      }
    }
    const auto tensor = [&](const std::vector<int32_t>& all) {
      return Tensor::FromVector(all, {kBatch, kLength}, device);
    };
    batch = {tensor(tokens), tensor(positions), tensor(targets),
             *MakeLayerSchedules(ModelConfig(), *attention, kLength, Mask::Causal())};
  }
  std::unique_ptr<BurstAttention> attention;
  SequenceBatch batch;
};

// Returns the values and gradients of all parameters. With `rounds`, every value and gradient is
// rounded to bfloat16 as the ops hand it on. A naive implementation keeps just that between its
// loops, which sum in `dtype`.
Values Gradients(const ModelConfig& config, DType dtype, DeviceType device, bool rounds = false) {
  const auto model = Make(config, dtype, device);
  const Problem problem(config.vocab, device);
  Tape tape;
  if (rounds) {
    tape.Watch([](const char*, const Tensor& tensor) {
      tensor.CopyFrom(tensor.To(DType::kBFloat16).To(tensor.dtype()));
    });
  }
  const Variable loss = model->Loss(tape, *problem.attention, problem.batch,
                                    /*loss_scale=*/1.0 / (kBatch * kLength), DropoutKey());
  EXPECT_EQ(tape.Backward(loss), absl::OkStatus());
  return model->parameters().grads().ToVector<double>();
}

double Norm(const Values& x, const Values& y, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum);
}

class Parity : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, Parity,
                         testing::Values("llama", "gpt2", "qwen", "phi", "olmo", "gemma"),
                         [](const auto& info) { return std::string(info.param); });

#ifdef BURST_TEST_CUDA
Values Logits(const ModelConfig& config, DType dtype, DeviceType device) {
  const auto model = Make(config, dtype, device);
  const Problem problem(config.vocab, device);
  Tape tape(/*recording=*/false);
  return model->Logits(tape, *problem.attention, problem.batch).value().ToVector<double>();
}

TEST_P(Parity, LogitsAreTheCpus) {
  const ModelConfig config = Model(GetParam());
  const Values cpu = Logits(config, DType::kFloat32, DeviceType::kCpu);
  const Values ours = Logits(config, DType::kFloat32, kTestDevice);
  ASSERT_EQ(ours.size(), cpu.size());
  double largest = 0, worst = 0;
  for (double logit : cpu) largest = std::max(largest, std::abs(logit));
  EXPECT_GT(largest, 0.5);
  for (size_t i = 0; i < cpu.size(); ++i) worst = std::max(worst, std::abs(ours[i] - cpu[i]));
  RecordProperty("largest_difference", std::to_string(worst / largest));
  EXPECT_LE(worst, 1e-4 * largest);
}
#endif

TEST_P(Parity, Bf16GradientsAreAsGoodAsNaiveOnes) {
  const ModelConfig config = Model(GetParam());
  const Values exact = Gradients(config, DType::kFloat64, DeviceType::kCpu);
  const Values naive = Gradients(config, DType::kFloat32, DeviceType::kCpu, /*rounds=*/true);
  const Values ours = Gradients(config, DType::kBFloat16, kTestDevice);
  const auto model = Make(config, DType::kFloat64, DeviceType::kCpu);
  const Values zero(exact.size(), 0);
  for (const Parameter& parameter : model->parameters().all()) {
    const int64_t begin = parameter.offset, end = begin + parameter.numel();
    const double size = Norm(exact, zero, begin, end);
    const double naive_error = Norm(naive, exact, begin, end) / size;
    const double error = Norm(ours, exact, begin, end) / size;
    // The kernels round in twice the number of places, such as attention's P and dS, by 2^-9 each.
    // They also round the logits, which are at most 1, and their gradients. The naive loss
    // does not round these.
    EXPECT_LE(error, 2 * naive_error + 0x1p-8) << parameter.name;
    EXPECT_LE(error, 0.05) << parameter.name;
    EXPECT_GT(naive_error, 1e-4) << parameter.name << ": nothing was rounded";
  }
}

}  // namespace
}  // namespace burst
